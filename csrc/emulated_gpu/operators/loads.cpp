// The virtual time of operators: the kind and the sizes with which the model of the hardware is called
// (emulated_seconds). Products and attention are bound by their FLOPs and counted as one kernel each; everything else
// by the bytes that it reads and writes, each once, as if one kernel computed the operator.
#include <algorithm>
#include <array>

#include "operator.h"

namespace emulated {
namespace {

// The factors of products, by the operator's name without its overload.
const std::map<std::string, std::pair<const char*, const char*>> kProducts = {
    {"aten::mm", {"self", "mat2"}},          {"aten::addmm", {"mat1", "mat2"}},
    {"aten::addmm_", {"mat1", "mat2"}},      {"aten::bmm", {"self", "mat2"}},
    {"aten::baddbmm", {"batch1", "batch2"}}, {"aten::baddbmm_", {"batch1", "batch2"}},
    {"aten::_grouped_mm", {"self", "mat2"}},
};

// They touch as many elements of their first argument as their result, or their other argument, has.
const std::set<std::string> kSelect = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"};
const std::set<std::string> kScatter = {"aten::index_add_", "aten::index_copy_", "aten::index_put_",
                                        "aten::scatter_",   "aten::scatter_add_"};

template <size_t Count>
double ask(const char* kind, const at::Tensor& of_dtype, const std::array<double, Count>& sizes) {
  return emulated_seconds(kind, c10::toString(of_dtype.scalar_type()), sizes.data(), static_cast<int>(Count));
}

double product_s(const at::Tensor& a, const at::Tensor& b, const char* kind) {
  const auto rows = static_cast<double>(a.numel()) / static_cast<double>(std::max<int64_t>(1, a.size(-1)));
  return ask<3>(kind, a, {rows, static_cast<double>(b.size(-1)), static_cast<double>(a.size(-1))});
}

// Heads lie before tokens, except in aten::_flash_attention_*, which also takes packed documents: then the longest
// counts for all, because the lengths are data. A causal mask ends with the last key.
double attention_s(const Operator& op, const Arguments& arguments) {
  const at::Tensor q = arguments.tensor("query"), k = arguments.tensor("key");
  const bool has_tokens_first = op.name.rfind("aten::_flash_attention", 0) == 0;
  const bool is_packed = q.dim() == 3;
  const int64_t dim = is_packed ? 0 : has_tokens_first ? 1 : 2;
  const auto queries = static_cast<double>(is_packed ? arguments["max_q"].toInt() : q.size(dim));
  const auto keys = static_cast<double>(is_packed ? arguments["max_k"].toInt() : k.size(dim));
  if (q.numel() == 0 || keys == 0) return 0;
  const bool is_causal = arguments["is_causal"].toBool();
  const double keys_of_query = is_causal ? std::max(keys - queries / 2, keys / 2) : keys;
  const bool is_backward = op.name.find("backward") != std::string::npos;
  // Scores and their sum of values: two products of two FLOPs for each element; in backward four such products.
  const double flops = 4 * static_cast<double>(q.numel()) * keys_of_query * (is_backward ? 2 : 1);
  const char* const kind = is_backward ? "attention backward" : "attention forward";
  return ask<2>(kind, q, {flops, static_cast<double>(q.size(-1))});
}

// Expanded elements are in memory once.
double bytes_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return 0;
  auto num_bytes = static_cast<double>(tensor.itemsize());
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) num_bytes *= static_cast<double>(tensor.size(d));
  }
  return num_bytes;
}

double bytes_of(const c10::IValue& value) {
  double sum = 0;
  each_tensor(value, [&sum](const at::Tensor& tensor) { sum += bytes_of(tensor); });
  return sum;
}

double memory_s(const Operator& op, const std::string& base, const Stack& arguments, const Stack& results) {
  const auto is_out = [&op](size_t i) { return op.schema().arguments()[i].is_out(); };
  double given = 0, made = 0;
  for (size_t i = 1; i < arguments.size(); ++i) (is_out(i) ? made : given) += bytes_of(arguments[i]);
  for (size_t i = 0; i < results.size(); ++i) {
    if (op.schema().returns()[i].alias_info() == nullptr) made += bytes_of(results[i]);
  }
  double num_bytes = made;
  bool is_written = made > 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    double touched = is_out(i) ? 0 : bytes_of(arguments[i]);
    if (i == 0 && kSelect.count(base) != 0) touched = std::min(touched, made);
    if (i == 0 && kScatter.count(base) != 0) touched = std::min(touched, given);
    if (op.is_written[i]) num_bytes += touched;
    if (!is_overwritten(op, i)) num_bytes += touched;
    is_written |= op.is_written[i] && touched > 0;
  }
  return is_written ? emulated_seconds("memory", "", &num_bytes, 1) : 0;  // else it is a query that host code answers
}

}  // namespace

Load load_of(const Operator& op, const Stack& arguments, const Stack& results) {
  if (!emulated_is_timed()) return {};
  const std::string base = op.name.substr(0, op.name.find('.'));
  const Arguments named(op.schema(), arguments);
  double seconds = 0;
  if (const auto product = kProducts.find(base); product != kProducts.end()) {
    const char* const kind = base == "aten::_grouped_mm" ? "grouped product" : "product";
    seconds = product_s(named.tensor(product->second.first), named.tensor(product->second.second), kind);
  } else if (attention_numbers().count(op.name) != 0) {
    seconds = attention_s(op, named);
  } else {
    seconds = memory_s(op, base, arguments, results);
  }
  return {Engine::kKernels, seconds, nullptr};
}

}  // namespace emulated
