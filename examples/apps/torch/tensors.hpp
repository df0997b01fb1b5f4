// tensors.hpp - tensors of torch as buffers of idist
#ifndef EXAMPLES_TORCH_TENSORS_HPP
#define EXAMPLES_TORCH_TENSORS_HPP

#include "idist.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

namespace idist_torch {

// An element of torch consists of `parts` elements of idist: a complex number of two.
struct ElementType {
    idist_dtype dtype;
    int64_t parts;
    bool only_bytes = false; // true if idist can move the elements, but not reduce them
};

// Returns the element type for a dtype of torch.
inline ElementType element_type(at::ScalarType type) {
    switch (type) {
    case at::kBool:
    case at::kByte: return {IDIST_U8, 1};
    case at::kChar: return {IDIST_I8, 1};
    case at::kShort: return {IDIST_I16, 1};
    case at::kInt: return {IDIST_I32, 1};
    case at::kLong: return {IDIST_I64, 1};
    case at::kUInt16: return {IDIST_U16, 1};
    case at::kUInt32: return {IDIST_U32, 1};
    case at::kUInt64: return {IDIST_U64, 1};
    case at::kHalf: return {IDIST_F16, 1};
    case at::kBFloat16: return {IDIST_BF16, 1};
    case at::kFloat: return {IDIST_F32, 1};
    case at::kDouble: return {IDIST_F64, 1};
    case at::kFloat8_e4m3fn: return {IDIST_F8E4M3, 1};
    case at::kFloat8_e5m2: return {IDIST_F8E5M2, 1};
    case at::kComplexHalf: return {IDIST_F16, 2};
    case at::kComplexFloat: return {IDIST_F32, 2};
    case at::kComplexDouble: return {IDIST_F64, 2};
    default: return {IDIST_U8, static_cast<int64_t>(c10::elementSize(type)), true};
    }
}

// Checks that `tensor` is dense memory of the host.
inline void check_tensor(const at::Tensor &tensor) {
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "idist takes dense tensors; this one is ",
                      tensor.layout());
    TORCH_CHECK_VALUE(tensor.device().is_cpu(), "idist takes CPU tensors; this one is on ",
                      tensor.device());
}

// Checks that a and b have the same dtype.
inline void check_same_dtype(const at::Tensor &a, const at::Tensor &b) {
    TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), "idist: the tensors of a call have the ",
                      "dtypes ", a.scalar_type(), " and ", b.scalar_type());
}

// Returns the tensor of a call that takes exactly one.
inline at::Tensor only(const std::vector<at::Tensor> &tensors) {
    TORCH_CHECK_VALUE(tensors.size() == 1, "idist: expected one tensor, got ", tensors.size());
    check_tensor(tensors[0]);
    return tensors[0];
}

// Returns the list of a call that takes exactly one list, which must have `size` tensors of the
// dtype of `like`.
inline std::vector<at::Tensor> only_list(const std::vector<std::vector<at::Tensor>> &lists,
                                         int size, const at::Tensor &like) {
    TORCH_CHECK_VALUE(lists.size() == 1, "idist: expected one list of tensors, got ", lists.size());
    TORCH_CHECK_VALUE(lists[0].size() == static_cast<size_t>(size), "idist: expected a list of ",
                      size, " tensors, one per rank, got ", lists[0].size());
    for (const at::Tensor &tensor : lists[0]) {
        check_tensor(tensor);
        check_same_dtype(tensor, like);
    }
    return lists[0];
}

// A contiguous buffer for a tensor. The buffer is the tensor itself, or a copy if the tensor is not
// contiguous.
class Buffer {
  public:
    // Makes a buffer that holds the elements of `tensor`.
    static Buffer of(const at::Tensor &tensor) {
        return Buffer(tensor, tensor.resolve_conj().resolve_neg().contiguous());
    }

    // Makes a buffer for a result, whose elements are not set yet.
    static Buffer for_result(const at::Tensor &tensor) {
        bool direct = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();

        return Buffer(tensor, direct ? tensor : at::empty(tensor.sizes(), tensor.options()));
    }

    void *data() const { return flat_.data_ptr(); }
    idist_dtype dtype() const { return type_.dtype; }
    size_t count() const { return static_cast<size_t>(flat_.numel() * type_.parts); }

    // Multiplies the elements by `factor`, in a copy.
    void scale(const at::Tensor &factor) { flat_ = flat_.mul(factor).to(tensor_.scalar_type()); }

    // Copies the elements to the tensor, unless they are there already.
    void store() const {
        if (!flat_.is_same(tensor_)) tensor_.copy_(flat_);
    }

  private:
    Buffer(const at::Tensor &tensor, at::Tensor flat)
        : tensor_(tensor), flat_(std::move(flat)), type_(element_type(tensor.scalar_type())) {}

    at::Tensor tensor_, flat_;
    ElementType type_;
};

// The elements of several tensors of one dtype, one after the other.
class Blocks {
  public:
    explicit Blocks(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
        type_ = element_type(tensors_[0].scalar_type());
        for (const at::Tensor &tensor : tensors_) {
            counts_.push_back(static_cast<size_t>(tensor.numel() * type_.parts));
            total_ += tensor.numel();
            equal_ = equal_ && counts_.back() == counts_[0];
        }
        flat_ = at::empty({total_}, tensors_[0].options());
    }

    // Copies the elements of the tensors into the buffer.
    Blocks &load() {
        for_each([](const at::Tensor &part, const at::Tensor &tensor) { part.copy_(tensor); });
        return *this;
    }

    // Copies the elements of the buffer to the tensors.
    void store() {
        for_each([](const at::Tensor &part, const at::Tensor &tensor) { tensor.copy_(part); });
    }

    // Multiplies the elements by `factor`.
    void scale(const at::Tensor &factor) { flat_.copy_(flat_.mul(factor)); }

    void *data() const { return flat_.data_ptr(); }
    idist_dtype dtype() const { return type_.dtype; }
    size_t count() const { return static_cast<size_t>(total_ * type_.parts); }
    const size_t *counts() const { return counts_.data(); }
    bool equal() const { return equal_; } // true if all blocks have the same size

  private:
    template <typename Visit> void for_each(Visit visit) {
        int64_t at = 0;

        for (const at::Tensor &tensor : tensors_) {
            visit(flat_.narrow(0, at, tensor.numel()).view(tensor.sizes()), tensor);
            at += tensor.numel();
        }
    }

    std::vector<at::Tensor> tensors_;
    std::vector<size_t> counts_;
    ElementType type_;
    at::Tensor flat_;
    int64_t total_ = 0;
    bool equal_ = true;
};

// A reduction of torch for tensors of one dtype.
struct Reduction {
    idist_op op;
    at::Tensor factor; // of PREMUL_SUM; otherwise undefined
};

// Returns the op for booleans, whose bytes are 0 or 1.
inline idist_op bool_op(c10d::ReduceOp::RedOpType op) {
    switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::BOR: return IDIST_LOR;
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::BAND: return IDIST_LAND;
    case c10d::ReduceOp::BXOR: return IDIST_LXOR;
    default: C10_THROW_ERROR(ValueError, "idist: this reduction takes no bool tensors");
    }
}

// Returns the factor of PREMUL_SUM as a tensor without dimensions.
inline at::Tensor premul_factor(const c10d::ReduceOp &op) {
    auto *given = dynamic_cast<c10d::PreMulSumSupplement *>(op.supplement_.get());

    TORCH_CHECK_VALUE(given, "idist: PREMUL_SUM has no factor");
    if (given->tensor_factor.defined()) return given->tensor_factor.reshape({});
    return at::scalar_tensor(given->double_factor, at::kDouble);
}

// Returns the reduction for an op of torch.
inline Reduction reduction_of(const c10d::ReduceOp &op, at::ScalarType type) {
    c10d::ReduceOp::RedOpType kind = op;

    TORCH_CHECK_VALUE(!element_type(type).only_bytes, "idist has no reductions for ", type);
    TORCH_CHECK_VALUE(!at::isComplexType(type) || c10d::isComplexViewAsRealAllowed(op),
                      "idist: this reduction takes no complex tensors");
    if (type == at::kBool) return {bool_op(kind), {}};
    switch (kind) {
    case c10d::ReduceOp::SUM: return {IDIST_SUM, {}};
    case c10d::ReduceOp::AVG: return {IDIST_AVG, {}};
    case c10d::ReduceOp::PRODUCT: return {IDIST_PROD, {}};
    case c10d::ReduceOp::MIN: return {IDIST_MIN, {}};
    case c10d::ReduceOp::MAX: return {IDIST_MAX, {}};
    case c10d::ReduceOp::BAND: return {IDIST_BAND, {}};
    case c10d::ReduceOp::BOR: return {IDIST_BOR, {}};
    case c10d::ReduceOp::BXOR: return {IDIST_BXOR, {}};
    case c10d::ReduceOp::PREMUL_SUM: return {IDIST_SUM, premul_factor(op)};
    default: C10_THROW_ERROR(ValueError, "idist: invalid reduction");
    }
}

} // namespace idist_torch

#endif // EXAMPLES_TORCH_TENSORS_HPP
