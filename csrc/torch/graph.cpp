// Looking through autograd's graph without making a Python object of every node.
//
// Headers alone, as with c10: nothing of libtorch is called, only members are read.
// oomkit._C compares the answers with those of Python's own nodes before it uses them.
#include "internal.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <typeinfo>
#include <vector>

namespace oomkit {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// Addresses, open addressing, at most half full.
class Addresses {
  public:
    explicit Addresses(size_t expected)
    {
        size_t room = 64;
        while (room < expected * 2) {
            room *= 2;
        }
        slots.resize(room);
    }

    bool
    has(const void *address) const
    {
        return slots[place(address)] != nullptr;
    }

    // False when it was there.
    bool
    add(const void *address)
    {
        size_t at = place(address);
        if (slots[at] != nullptr) {
            return false;
        }
        slots[at] = address;
        if (++count * 2 > slots.size()) {
            grow();
        }
        return true;
    }

  private:
    std::vector<const void *> slots;
    size_t count = 0;

    size_t
    place(const void *address) const
    {
        const size_t mask = slots.size() - 1;
        const uint64_t hash =
            reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15u;
        size_t at = static_cast<size_t>(hash >> 32) & mask;
        while (slots[at] != nullptr && slots[at] != address) {
            at = (at + 1) & mask;
        }
        return at;
    }

    void
    grow()
    {
        std::vector<const void *> old(slots.size() * 2);
        old.swap(slots);
        for (const void *address : old) {
            if (address != nullptr) {
                slots[place(address)] = address;
            }
        }
    }
};

// By its name, compared once: the type itself is a symbol of libtorch.
bool
is_leaf(const Node *node, const std::type_info **leaf_type)
{
    const std::type_info &type = typeid(*node);
    if (&type == *leaf_type) {
        return true;
    }
    if (std::strcmp(type.name(), "N5torch8autograd14AccumulateGradE") != 0) {
        return false;
    }
    *leaf_type = &type;
    return true;
}

bool
leads_to_known(std::vector<const Node *> &work, const Addresses &known, bool bare)
{
    const std::type_info *leaf_type = nullptr;
    Addresses seen(256);
    while (!work.empty()) {
        const Node *node = work.back();
        work.pop_back();
        if (is_leaf(node, &leaf_type)) {
            const c10::TensorImpl *leaf = static_cast<const AccumulateGrad *>(node)
                                              ->variable.unsafeGetTensorImpl();
            if (!known.has(leaf) && !(bare && grad_of(leaf) == nullptr)) {
                return false;
            }
        } else if (seen.add(node)) {
            for (const torch::autograd::Edge &edge : node->next_edges()) {
                if (edge.function != nullptr) {
                    work.push_back(edge.function.get());
                }
            }
        }
    }
    return true;
}

// The node that made a tensor into `work`. False where torch may have to make it anew:
// of a view whose base has changed.
bool
add_node(const c10::TensorImpl *impl, std::vector<const Node *> &work)
{
    const auto *meta =
        static_cast<const torch::autograd::AutogradMeta *>(impl->autograd_meta());
    if (meta == nullptr) {
        return true;
    }
    if (meta->is_view_) {
        return false;
    }
    if (meta->grad_fn_ != nullptr) {
        work.push_back(meta->grad_fn_.get());
    }
    return true;
}

} // namespace

int
graph_known(const void *const *roots, size_t root_count, const void *const *known,
            size_t known_count, ptrdiff_t offset, int bare) noexcept
{
    try {
        std::vector<const Node *> work;
        Addresses addresses(known_count);
        for (size_t i = 0; i < root_count; i++) {
            if (!add_node(impl_of(roots[i], offset), work)) {
                return 0;
            }
        }
        for (size_t i = 0; i < known_count; i++) {
            addresses.add(impl_of(known[i], offset));
        }
        return leads_to_known(work, addresses, bare != 0) ? 1 : 0;
    } catch (...) {
        return 0;
    }
}

} // namespace oomkit
