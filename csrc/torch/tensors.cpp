// Marks and facts of tensors, read from their TensorImpl.
//
// Marks hold gradients weakly: the TensorImpl's address stays taken, so that a later
// gradient cannot be mistaken for this one, while its storage can be freed. Parameters
// are never held: torch.utils.swap_tensors refuses a tensor that has another holder.
#include "internal.h"
#include "tensor_impl.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>

namespace oomkit {

namespace {

constexpr uint64_t SAMPLED = 64; // values of a tensor
constexpr uint64_t WIDEST = 16;  // bytes of one: complex<double>

// The gradient's TensorImpl, or NULL when there is none. at::Tensor is incomplete with
// c10's headers alone, but it is a single intrusive pointer; oomkit._C compares what
// comes out of here with `tensor.grad._cdata` before it uses the bridge.
c10::TensorImpl *
grad_of(const c10::TensorImpl *impl)
{
    const c10::AutogradMetaInterface *meta = impl->autograd_meta();
    if (meta == nullptr) {
        return nullptr;
    }
    const at::Tensor &grad = meta->grad();
    c10::TensorImpl *found;
    std::memcpy(&found, &reinterpret_cast<const char &>(grad), sizeof found);
    return found == c10::UndefinedTensorImpl::singleton() ? nullptr : found;
}

uint64_t
mix(uint64_t hash, uint64_t value)
{
    hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 33);
}

// A hash of words in four lanes, which do not wait for each other: this runs for every
// parameter of a model. Each step of a lane is one to one.
struct Lanes {
    uint64_t lane[4] = {1, 2, 3, 4};
    unsigned next = 0;

    void
    add(uint64_t word)
    {
        uint64_t &hash = lane[next++ & 3];
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }

    void
    add_bytes(const unsigned char *bytes, uint64_t size)
    {
        uint64_t word, at = 0;
        for (; at + sizeof word <= size; at += sizeof word) {
            std::memcpy(&word, bytes + at, sizeof word);
            add(word);
        }
        if (at < size) {
            word = 0;
            std::memcpy(&word, bytes + at, size - at);
            add(word);
        }
    }

    uint64_t
    sum() const
    {
        return mix(mix(mix(lane[0], lane[1]), lane[2]), lane[3]);
    }
};

// TensorImpl::requires_grad() without a call into c10: nearly all have no such data.
bool
requires_grad_of(const c10::TensorImpl *impl)
{
    const c10::AutogradMetaInterface *meta = impl->autograd_meta();
    return meta != nullptr && meta->requires_grad();
}

void
grads_note(const void *const *holders, ptrdiff_t offset, size_t count,
           const void **grads)
{
    const c10::TensorImpl *first = nullptr;
    for (size_t i = count; i-- > 0;) {
        const c10::TensorImpl *grad = grad_of(impl_of(holders[i], offset));
        grads[i] = grad;
        first = grad == nullptr ? first : grad;
    }
    grads[count] = reinterpret_cast<const void *>(
        static_cast<uintptr_t>(first == nullptr ? 0 : version_of(first)));
}

void
fill_facts(const c10::TensorImpl *impl, int64_t dim, oomkit_tensor_facts *facts)
{
    const c10::IntArrayRef sizes = impl->sizes();
    const int64_t ndim = static_cast<int64_t>(sizes.size());
    const int64_t wanted = dim < 0 ? dim + ndim : dim;
    const c10::ScalarType dtype = c10::typeMetaToScalarType(impl->dtype());
    const c10::Device device = impl->device();
    uint64_t hash = mix(0, static_cast<uint64_t>(dtype));
    for (int64_t i = 0; i < ndim; i++) {
        hash = mix(hash, i == wanted ? UINT64_MAX : static_cast<uint64_t>(sizes[i]));
    }
    facts->ndim = ndim;
    facts->size = wanted >= 0 && wanted < ndim ? sizes[wanted] : -1;
    facts->shape_hash = hash;
    facts->bytes = static_cast<uint64_t>(impl->numel()) * impl->itemsize();
    facts->has_version = impl->version_counter().enabled() ? 1 : 0;
    facts->version = version_of(impl);
    facts->dtype = static_cast<int32_t>(dtype);
    facts->device_type = static_cast<int32_t>(device.type());
    facts->device_index = device.is_cpu() ? -1 : static_cast<int32_t>(device.index());
    facts->requires_grad = requires_grad_of(impl) ? 1 : 0;
    facts->is_strided = impl->layout() == c10::kStrided ? 1 : 0;
    // A tensor that requires grad may be either: only libtorch knows its grad_fn.
    facts->is_leaf = facts->requires_grad ? -1 : 1;
}

uint8_t
compare_one(const c10::TensorImpl *impl, const oomkit_grad_mark *mark, uint32_t *step)
{
    const c10::TensorImpl *grad = grad_of(impl);
    *step = 0;
    if (grad != mark->grad) {
        if (mark->grad == nullptr) {
            return OOMKIT_GRAD_NEW;
        }
        return grad == nullptr ? OOMKIT_GRAD_GONE : OOMKIT_GRAD_REPLACED;
    }
    if (grad == nullptr) {
        return OOMKIT_GRAD_SAME;
    }
    *step = version_of(grad) - mark->version;
    return *step == 0 ? OOMKIT_GRAD_SAME : OOMKIT_GRAD_MOVED;
}

// Its values can be read where they lie: on the CPU, strided, its own (a DTensor has
// them in another tensor), and as they are (not conjugated or negated on the way).
bool
is_readable(const c10::TensorImpl *impl)
{
    return impl != nullptr && impl != c10::UndefinedTensorImpl::singleton() &&
           !is_opaque(impl) && impl->device().is_cpu() &&
           !impl->key_set().has_any(c10::DispatchKeySet(
               {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})) &&
           impl->layout() == c10::kStrided && impl->has_storage() &&
           impl->storage().data() != nullptr;
}

// Value number `index`: as they lie, for channels_last has an order of its own; in rows
// and columns where there are gaps, as a copy of it has them.
const unsigned char *
value_of(const c10::TensorImpl *impl, bool has_gaps, uint64_t index)
{
    const auto *bytes = static_cast<const unsigned char *>(impl->data());
    int64_t at = static_cast<int64_t>(index);

    if (has_gaps) {
        int64_t rest = at;
        at = 0;
        for (int64_t d = impl->dim() - 1; d >= 0; d--) {
            at += rest % impl->size(d) * impl->stride(d);
            rest /= impl->size(d);
        }
    }
    return bytes + at * static_cast<int64_t>(impl->itemsize());
}

// They can be copied as well: contiguous, and of that size.
bool
is_plain_bytes(const c10::TensorImpl *impl, uint64_t size)
{
    return is_readable(impl) && impl->is_contiguous() && size > 0 &&
           static_cast<uint64_t>(impl->numel()) * impl->itemsize() == size;
}

} // namespace

int
bytes_get(const void *holder, ptrdiff_t offset, void *bytes, uint64_t size) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(holder, offset);
        if (!is_plain_bytes(impl, size)) {
            return OOMKIT_EUNSUPPORTED;
        }
        std::memcpy(bytes, impl->data(), size);
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
bytes_set(const void *holder, ptrdiff_t offset, const void *bytes,
          uint64_t size) noexcept
{
    try {
        c10::TensorImpl *impl = const_cast<c10::TensorImpl *>(impl_of(holder, offset));
        if (!is_plain_bytes(impl, size)) {
            return OOMKIT_EUNSUPPORTED;
        }
        // Unchanged ones are not written: they may lie in read-only pages.
        if (std::memcmp(impl->data(), bytes, size) != 0) {
            std::memcpy(impl->mutable_data(), bytes, size);
        }
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

uint64_t
sample(const void *holder, ptrdiff_t offset) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(holder, offset);
        if (!is_readable(impl) || impl->numel() == 0 || impl->itemsize() > WIDEST) {
            return 0;
        }
        const uint64_t count = static_cast<uint64_t>(impl->numel());
        const uint64_t size = impl->itemsize();
        const bool has_gaps = !impl->is_non_overlapping_and_dense();
        Lanes lanes;
        if (count <= SAMPLED) { // all of them
            unsigned char every[SAMPLED * WIDEST];
            for (uint64_t v = 0; v < count; v++) {
                std::memcpy(every + v * size, value_of(impl, has_gaps, v), size);
            }
            lanes.add_bytes(every, count * size);
            return lanes.sum();
        }
        for (uint64_t v = 0; v < SAMPLED; v++) {
            const unsigned char *value = value_of(impl, has_gaps, count * v / SAMPLED);
            uint32_t word;
            if (size == sizeof word) {
                std::memcpy(&word, value, sizeof word);
                lanes.add(word);
            } else {
                lanes.add_bytes(value, size);
            }
        }
        return lanes.sum();
    } catch (...) {
        return 0;
    }
}

int
tensor_facts(const void *holder, ptrdiff_t offset, int64_t dim,
             oomkit_tensor_facts *facts) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(holder, offset);
        if (impl == nullptr || impl == c10::UndefinedTensorImpl::singleton()) {
            return OOMKIT_EINVAL;
        }
        if (is_opaque(impl)) {
            return OOMKIT_EUNSUPPORTED;
        }
        fill_facts(impl, dim, facts);
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
versions(const void *const *holders, ptrdiff_t offset, size_t count, uint32_t *values,
         uint8_t *requires_grad, const void **grads) noexcept
{
    try {
        for (size_t i = 0; i < count; i++) {
            const c10::TensorImpl *impl = impl_of(holders[i], offset);
            if (values != nullptr) {
                values[i] = version_of(impl);
            }
            if (requires_grad != nullptr) {
                requires_grad[i] = requires_grad_of(impl) ? 1 : 0;
            }
        }
        if (grads != nullptr) {
            grads_note(holders, offset, count, grads);
        }
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
grads_mark(const void *const *holders, ptrdiff_t offset, size_t count,
           oomkit_grad_mark *marks) noexcept
{
    size_t made = 0;
    try {
        for (; made < count; made++) {
            c10::TensorImpl *grad = grad_of(impl_of(holders[made], offset));
            marks[made].grad = grad;
            marks[made].version = grad == nullptr ? 0 : version_of(grad);
            if (grad != nullptr) {
                c10::raw::weak_intrusive_ptr::incref(grad);
            }
        }
        return OOMKIT_OK;
    } catch (...) {
        grads_release(marks, made);
        return OOMKIT_EFAILED;
    }
}

int
grads_compare(const void *const *holders, ptrdiff_t offset, size_t count,
              const oomkit_grad_mark *marks, uint8_t *states, uint32_t *steps,
              size_t *moved) noexcept
{
    size_t differ = 0;
    try {
        for (size_t i = 0; i < count; i++) {
            uint32_t step;
            states[i] = compare_one(impl_of(holders[i], offset), &marks[i], &step);
            differ += states[i] != OOMKIT_GRAD_SAME;
            if (steps != nullptr) {
                steps[i] = step;
            }
        }
        *moved = differ;
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

void
grads_release(oomkit_grad_mark *marks, size_t count) noexcept
{
    for (size_t i = 0; i < count; i++) {
        void *grad = marks[i].grad;
        marks[i].grad = nullptr;
        marks[i].version = 0;
        if (grad != nullptr) {
            c10::raw::weak_intrusive_ptr::decref(static_cast<c10::TensorImpl *>(grad));
        }
    }
}

int
modes_get(oomkit_thread_modes *modes) noexcept
{
    const c10::DispatchKeySet off = c10::impl::tls_local_dispatch_key_set().excluded_;
    modes->autocast = (off & c10::autocast_dispatch_keyset).raw_repr();
    modes->grad = c10::GradMode::is_enabled() ? 1 : 0;
    modes->dispatch =
        static_cast<int32_t>(c10::impl::TorchDispatchModeTLS::stack_len());
    return OOMKIT_OK;
}

int
modes_set(const oomkit_thread_modes *modes) noexcept
{
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) |
                     c10::DispatchKeySet(c10::DispatchKeySet::RAW, modes->autocast);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
    c10::GradMode::set_enabled(modes->grad != 0);
    while (modes->dispatch >= 0 &&
           c10::impl::TorchDispatchModeTLS::stack_len() > modes->dispatch) {
        (void)c10::impl::TorchDispatchModeTLS::pop_stack();
    }
    return OOMKIT_OK;
}

} // namespace oomkit
