// A tensor's TensorImpl: where it lies, and what all files of this folder ask it.
#ifndef OOMKIT_TORCH_TENSOR_IMPL_H
#define OOMKIT_TORCH_TENSOR_IMPL_H

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace oomkit {

inline c10::TensorImpl *
impl_of(const void *holder, ptrdiff_t offset)
{
    c10::TensorImpl *impl;
    std::memcpy(&impl, static_cast<const char *>(holder) + offset, sizeof impl);
    return impl;
}

inline uint32_t
version_of(const c10::TensorImpl *impl)
{
    const c10::VariableVersion &counter = impl->version_counter();
    return counter.enabled() ? counter.current_version() : 0;
}

// Tensors whose sizes only Python or a C++ subclass of its own knows.
inline bool
is_opaque(const c10::TensorImpl *impl)
{
    using c10::DispatchKey;
    return impl->has_symbolic_sizes_strides() ||
           impl->key_set().has_any(c10::DispatchKeySet(
               {DispatchKey::Python, DispatchKey::FuncTorchBatched,
                DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize,
                DispatchKey::NestedTensor}));
}

} // namespace oomkit

#endif
