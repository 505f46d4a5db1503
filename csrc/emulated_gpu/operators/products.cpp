// Products of matrices, and sums of their rows: those with a wider result than their factors, for which only CUDA has
// kernels, those with other results on the CPU, and those too large to compute: a profiler loads a GPU for a while with
// a product that takes a CPU minutes.
#include <cstdio>

#include "operator.h"

namespace emulated {
namespace {

bool is_too_large(const at::Tensor& a, const at::Tensor& b) {
  const double gflop = 2e-9 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
  if (gflop <= emulated_max_product_gflop()) return false;
  static const bool is_told = [gflop] {
    std::fprintf(stderr, "emulated GPU: products of %.0f GFLOP are zeros: more than max_product_gflop\n", gflop);
    return true;
  }();
  (void)is_told;
  emulated_count("products that were too large");
  return true;
}

Stack mm(const Arguments& arguments) {
  const at::Tensor a = arguments.tensor("self"), b = arguments.tensor("mat2");
  if (is_too_large(a, b)) return {at::zeros({a.size(0), b.size(1)}, a.options())};
  return {at::mm(a, b)};
}

Stack mm_wide(const Arguments& arguments) {
  const auto dtype = arguments["out_dtype"].toScalarType();
  return {at::mm(arguments.tensor("self").to(dtype), arguments.tensor("mat2").to(dtype))};
}

Stack bmm_wide(const Arguments& arguments) {
  const auto dtype = arguments["out_dtype"].toScalarType();
  return {at::bmm(arguments.tensor("self").to(dtype), arguments.tensor("mat2").to(dtype))};
}

Stack addmm_wide(const Arguments& arguments) {
  const auto dtype = arguments["out_dtype"].toScalarType();
  return {at::addmm(arguments.tensor("self").to(dtype), arguments.tensor("mat1").to(dtype),
                    arguments.tensor("mat2").to(dtype), arguments["beta"].toScalar(), arguments["alpha"].toScalar())};
}

Stack addmm_wide_out(const Arguments& arguments) {
  return {arguments.tensor("out").copy_(addmm_wide(arguments)[0].toTensor())};
}

// CUTLASS's host code writes descriptors that only a GPU can make. Each of the matrices [e, k, n] has a range of rows.
Stack grouped_mm_results(const Arguments& arguments) {
  const at::Tensor rows = arguments.tensor("self"), matrices = arguments.tensor("mat2");
  TORCH_CHECK(rows.dim() == 2 && matrices.dim() == 3, "a grouped product of other shapes is not emulated");
  return {at::empty({rows.size(0), matrices.size(2)}, rows.options())};
}

// Sums of rows. The tensors that CUDA keeps beside them for a backward have other sizes than on the CPU.
Stack embedding_bag(const Arguments& arguments) {
  TORCH_CHECK(!arguments.optional_tensor("per_sample_weights").defined(), "weighted sums of rows are not emulated");
  return {std::get<0>(at::_embedding_bag_forward_only(
      arguments.tensor("weight"), arguments.tensor("indices"), arguments.tensor("offsets"), false,
      arguments["mode"].toInt(), false, {}, arguments["include_last_offset"].toBool(),
      arguments["padding_idx"].toInt()))};
}

}  // namespace

const std::map<std::string, MakeResults>& product_results() {
  static const std::map<std::string, MakeResults> results = {{"aten::_grouped_mm", grouped_mm_results}};
  return results;
}

const std::map<std::string, Numbers>& product_numbers() {
  static const std::map<std::string, Numbers> numbers = {
      {"aten::mm", mm},
      {"aten::mm.dtype", mm_wide},
      {"aten::bmm.dtype", bmm_wide},
      {"aten::addmm.dtype", addmm_wide},
      {"aten::addmm.dtype_out", addmm_wide_out},
      {"aten::_embedding_bag_forward_only", embedding_bag},
  };
  return numbers;
}

}  // namespace emulated
