// Storages: who shares one, which is gone, and tensors made over another one.
//
// Tensors are given to us as Python objects that are made already, empty; what they are
// is set in place. So nothing here allocates a tensor's memory, calls a kernel, is seen
// by a mode of torch's, or bumps a version.
#include "internal.h"
#include "tensor_impl.h"

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <new>

namespace oomkit {

namespace {

struct Form {
    c10::SmallVector<int64_t, 5> sizes, strides;
    int64_t offset; // in elements
    caffe2::TypeMeta dtype;
    c10::VariableVersion counter;
    uint32_t version;
};

struct Restored {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter;
    uint32_t version;
    int64_t stream;
};

// A counter of versions has no address that it shows, but is a single pointer.
static_assert(sizeof(c10::VariableVersion) == sizeof(void *));

const void *
identity(const c10::VariableVersion &counter)
{
    const void *address;
    std::memcpy(&address, &reinterpret_cast<const char &>(counter), sizeof address);
    return address;
}

bool
is_plain(const c10::TensorImpl *impl)
{
    using c10::DispatchKey;
    return impl != nullptr && impl != c10::UndefinedTensorImpl::singleton() &&
           !is_opaque(impl) && impl->layout() == c10::kStrided && impl->has_storage() &&
           !impl->device().is_meta() &&
           (impl->numel() == 0 || impl->storage().data() != nullptr) &&
           impl->version_counter().enabled() &&
           !c10::isQIntType(c10::typeMetaToScalarType(impl->dtype())) &&
           impl->get_backend_meta_intrusive_ptr() == nullptr &&
           !impl->key_set().has_any(
               c10::DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative,
                                    DispatchKey::ZeroTensor}));
}

// One past the last element that the tensor reaches, from its first one.
int64_t
reach(const c10::TensorImpl *impl)
{
    const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
    int64_t last = 0;
    if (impl->numel() == 0) {
        return 0;
    }
    for (size_t i = 0; i < sizes.size(); i++) {
        last += (sizes[i] - 1) * strides[i];
    }
    return last + 1;
}

// The stream of this thread on the device of the tensor: memory that one stream got
// must not be given to another without more ado. 0 on the CPU.
int64_t
stream_of(const c10::TensorImpl *impl)
{
    const c10::Device device = impl->device();
    if (device.is_cpu()) {
        return 0;
    }
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

} // namespace

int
storage_facts(const void *holder, ptrdiff_t offset,
              oomkit_storage_facts *facts) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(holder, offset);
        if (!is_plain(impl)) {
            return OOMKIT_EUNSUPPORTED;
        }
        const c10::StorageImpl *storage = impl->storage().unsafeGetStorageImpl();
        const c10::Device device = impl->device();
        const uint64_t size = impl->itemsize();
        facts->storage = storage;
        facts->data = storage->data();
        facts->counter = identity(impl->version_counter());
        facts->bytes = storage->nbytes();
        facts->begin = static_cast<uint64_t>(impl->storage_offset()) * size;
        facts->end = facts->begin + static_cast<uint64_t>(reach(impl)) * size;
        facts->version = version_of(impl);
        facts->device_type = static_cast<int32_t>(device.type());
        facts->device_index =
            device.is_cpu() ? -1 : static_cast<int32_t>(device.index());
        facts->requires_grad = impl->requires_grad() ? 1 : 0;
        return facts->end <= facts->bytes ? OOMKIT_OK : OOMKIT_EUNSUPPORTED;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
storages_hold(const void *const *holders, ptrdiff_t offset, size_t count,
              void **holds) noexcept
{
    size_t made = 0;
    try {
        for (; made < count; made++) {
            const c10::TensorImpl *impl = impl_of(holders[made], offset);
            holds[made] = nullptr;
            if (is_plain(impl)) {
                c10::StorageImpl *storage = impl->storage().unsafeGetStorageImpl();
                c10::raw::weak_intrusive_ptr::incref(storage);
                holds[made] = storage;
            }
        }
        return OOMKIT_OK;
    } catch (...) {
        storages_release(holds, made);
        return OOMKIT_EFAILED;
    }
}

void
storages_release(void **holds, size_t count) noexcept
{
    for (size_t i = 0; i < count; i++) {
        auto *storage = static_cast<c10::StorageImpl *>(holds[i]);
        holds[i] = nullptr;
        if (storage != nullptr) {
            c10::raw::weak_intrusive_ptr::decref(storage);
        }
    }
}

int
storage_bytes(const void *source, ptrdiff_t offset, uint64_t begin, uint64_t end,
              const void *target) noexcept
{
    try {
        c10::TensorImpl *into = impl_of(target, offset);
        const c10::TensorImpl *from = impl_of(source, offset);
        if (!is_plain(into) || !is_plain(from) || into->itemsize() != 1 ||
            into->device() != from->device()) {
            return OOMKIT_EUNSUPPORTED;
        }
        const int64_t sizes[] = {static_cast<int64_t>(end - begin)}, strides[] = {1};
        into->set_storage_keep_dtype(from->storage());
        into->set_sizes_and_strides(sizes, strides, static_cast<int64_t>(begin));
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
tensor_alias(const void *source, ptrdiff_t offset, const void *target) noexcept
{
    try {
        c10::TensorImpl *into = impl_of(target, offset);
        const c10::TensorImpl *from = impl_of(source, offset);
        if (!is_plain(into) || !is_plain(from) || into->device() != from->device()) {
            return OOMKIT_EUNSUPPORTED;
        }
        into->set_storage_and_dtype(from->storage(), from->dtype());
        into->set_sizes_and_strides(from->sizes(), from->strides(),
                                    from->storage_offset());
        into->set_version_counter(from->version_counter());
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
form_make(const void *holder, ptrdiff_t offset, void **form) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(holder, offset);
        const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
        *form = new Form{{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()},
                         impl->storage_offset(),       impl->dtype(),
                         impl->version_counter(),      version_of(impl)};
        return OOMKIT_OK;
    } catch (const std::bad_alloc &) {
        return OOMKIT_EOOM;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

void
form_release(void *form) noexcept
{
    delete static_cast<Form *>(form);
}

void
form_versions(const void *form, uint32_t *then, uint32_t *now) noexcept
{
    const auto *of = static_cast<const Form *>(form);
    *then = of->version;
    *now = of->counter.current_version();
}

int
restored_make(const void *base, ptrdiff_t offset, void **restored) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(base, offset);
        if (!is_plain(impl)) {
            return OOMKIT_EUNSUPPORTED;
        }
        c10::StorageImpl *storage = impl->storage().unsafeGetStorageImpl();
        const int64_t stream = stream_of(impl);
        c10::raw::weak_intrusive_ptr::incref(storage);
        auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(storage);
        *restored = new Restored{std::move(weak), impl->version_counter(),
                                 version_of(impl), stream};
        return OOMKIT_OK;
    } catch (const std::bad_alloc &) {
        return OOMKIT_EOOM;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

void
restored_release(void *restored) noexcept
{
    delete static_cast<Restored *>(restored);
}

int
restored_apply(const void *restored, const void *form, uint64_t begin,
               const void *target, ptrdiff_t offset) noexcept
{
    try {
        const auto *from = static_cast<const Restored *>(restored);
        const auto *of = static_cast<const Form *>(form);
        c10::TensorImpl *into = impl_of(target, offset);
        if (!is_plain(into)) {
            return OOMKIT_EUNSUPPORTED;
        }
        if (from->counter.current_version() != from->version ||
            stream_of(into) != from->stream) {
            return 0;
        }
        c10::intrusive_ptr<c10::StorageImpl> storage = from->storage.lock();
        if (!storage) {
            return 0;
        }
        const int64_t skipped = static_cast<int64_t>(begin / of->dtype.itemsize());
        into->set_storage_and_dtype(c10::Storage(std::move(storage)), of->dtype);
        into->set_sizes_and_strides(of->sizes, of->strides, of->offset - skipped);
        into->set_version_counter(from->counter);
        return 1;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

void
unseen_enter(oomkit_thread_keys *keys) noexcept
{
    const c10::DispatchKeySet python(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    keys->included = now.included_.raw_repr();
    keys->excluded = now.excluded_.raw_repr();
    now.included_ = now.included_ - python;
    now.excluded_ = now.excluded_ | python;
    c10::impl::_force_tls_local_dispatch_key_set(now);
}

void
unseen_leave(const oomkit_thread_keys *keys) noexcept
{
    c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    now.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, keys->included);
    now.excluded_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, keys->excluded);
    c10::impl::_force_tls_local_dispatch_key_set(now);
}

} // namespace oomkit
