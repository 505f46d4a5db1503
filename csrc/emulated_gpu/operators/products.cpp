// Products of matrices with a wider result than their factors, which only CUDA has kernels for.
#include "operator.h"

namespace emulated {
namespace {

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

}  // namespace

const std::map<std::string, Numbers>& product_numbers() {
  static const std::map<std::string, Numbers> numbers = {
      {"aten::mm.dtype", mm_wide},
      {"aten::bmm.dtype", bmm_wide},
      {"aten::addmm.dtype", addmm_wide},
  };
  return numbers;
}

}  // namespace emulated
