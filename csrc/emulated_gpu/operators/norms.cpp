// Norms whose statistics CUDA keeps in fp32, but the CPU in the dtype of the input, or for which it has no kernel.
#include <array>
#include <limits>

#include "operator.h"

namespace emulated {
namespace {

using at::Tensor;

Tensor wide(const Tensor& tensor) { return tensor.to(at::kFloat); }

std::optional<Tensor> wide_or_none(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(wide(tensor)) : std::nullopt;
}

Stack layer_norm(const Arguments& arguments) {
  const auto [out, mean, rstd] = at::native_layer_norm(
      wide(arguments.tensor("input")), arguments["normalized_shape"].toIntVector(),
      wide_or_none(arguments.optional_tensor("weight")), wide_or_none(arguments.optional_tensor("bias")),
      arguments["eps"].toDouble());
  return {out, mean, rstd};
}

Stack layer_norm_backward(const Arguments& arguments) {
  const auto wanted = arguments["output_mask"].toBoolList();
  const auto [dx, dweight, dbias] = at::native_layer_norm_backward(
      wide(arguments.tensor("grad_out")), wide(arguments.tensor("input")), arguments["normalized_shape"].toIntVector(),
      wide(arguments.tensor("mean")), wide(arguments.tensor("rstd")), wide_or_none(arguments.optional_tensor("weight")),
      wide_or_none(arguments.optional_tensor("bias")), std::array<bool, 3>{wanted[0], wanted[1], wanted[2]});
  return {dx, dweight, dbias};
}

// The dims that are normalized, counted from the end.
std::vector<int64_t> normalized_dims(const Arguments& arguments) {
  std::vector<int64_t> dims;
  for (auto d = static_cast<int64_t>(arguments["normalized_shape"].toIntVector().size()); d > 0; --d) dims.push_back(-d);
  return dims;
}

Tensor weight_or_one(const Arguments& arguments, const Tensor& like) {
  const Tensor weight = arguments.optional_tensor("weight");
  return weight.defined() ? wide(weight) : at::ones({1}, like.options());
}

// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps)
Stack rms_norm(const Arguments& arguments) {
  const Tensor input = arguments.tensor("input"), x = wide(input);
  const double eps = arguments.optional_double("eps").value_or(std::numeric_limits<float>::epsilon());
  const Tensor rstd = x.pow(2).mean(normalized_dims(arguments), true).add(eps).rsqrt();
  return {(x * rstd * weight_or_one(arguments, x)).to(input.dtype()), rstd};
}

// With h = x * rstd and u = grad * weight: dx = (u - h * mean(u * h)) * rstd, dweight = sum(grad * h)
Stack rms_norm_backward(const Arguments& arguments) {
  const Tensor grad = wide(arguments.tensor("grad_out")), x = wide(arguments.tensor("input"));
  const Tensor rstd = wide(arguments.tensor("rstd")), h = x * rstd;
  const Tensor u = grad * weight_or_one(arguments, x);
  const auto dims = normalized_dims(arguments);
  const auto wanted = arguments["output_mask"].toBoolList();
  Tensor dweight;
  if (wanted[1] && arguments.optional_tensor("weight").defined()) {
    std::vector<int64_t> outer;
    for (int64_t d = 0; d < x.dim() - static_cast<int64_t>(dims.size()); ++d) outer.push_back(d);
    dweight = outer.empty() ? grad * h : (grad * h).sum(outer);
  }
  return {wanted[0] ? (u - h * (u * h).mean(dims, true)) * rstd : Tensor(), dweight};
}

}  // namespace

const std::map<std::string, Numbers>& norm_numbers() {
  static const std::map<std::string, Numbers> numbers = {
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::_fused_rms_norm", rms_norm},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
  };
  return numbers;
}

}  // namespace emulated
