// Attention kernels that are not known to index in 64 bits take no tensor whose last element 32 bits do not reach.
//
// memo/spec/reach.py lists the kernels that are known to, with sources; memo cuts its calls by it. Without this check a
// call that reaches further would pass here and fail on a GPU, or worse, give wrong numbers there.
#include "operator.h"

namespace emulated {
namespace {

constexpr int64_t kReach = int64_t{1} << 31;  // elements from a tensor's beginning; one of 32 bits is the sign

// The backward of FlashAttention 2 is not among them: its sums of dQ were indexed in 32 bits until February 2026.
const std::set<std::string> kKnownTo64Bits = {
    "aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward",
    "aten::_flash_attention_forward_no_dropout_inplace",
};

}  // namespace

bool may_index_in_32_bits(const std::string& name) {
  return attention_numbers().count(name) != 0 && kKnownTo64Bits.count(name) == 0;
}

void check_reach(const Operator& op, const Stack& values) {
  if (!op.may_index_in_32_bits) return;
  for (const c10::IValue& value : values) {
    each_tensor(value, [&op](const at::Tensor& tensor) {
      TORCH_CHECK(last_offset(tensor) < kReach, op.name, " is given ", tensor.sizes(), " of strides ",
                  tensor.strides(), ", whose last element lies ", last_offset(tensor),
                  " from the first: it is not known to index in 64 bits, so give it parts within 2^31");
    });
  }
}

}  // namespace emulated
