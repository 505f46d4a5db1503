// Attention through flash and cuDNN, forward and backward, on the CPU's flash kernel.
//
// Shapes: b batch, n heads (g of keys and values: n is a multiple of g), s tokens, d head size, t tokens of all packed
// documents. The CPU kernel wants [b, n, s, d] and n heads on both sides, and gives log-sum-exp as [b, n, s].
#include <limits>
#include <tuple>

#include "operator.h"

namespace emulated {
namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of q, k and v

struct Options {
  bool is_causal;
  std::optional<double> scale;
};

Options options_of(const Arguments& arguments) {
  TORCH_CHECK(arguments["dropout_p"].toDouble() == 0.0, "attention with dropout is not emulated");
  return {arguments["is_causal"].toBool(), arguments.optional_double("scale")};
}

// The CPU kernel aligns a causal mask with the first key, flash with the last.
void check_lengths(const Tensor& q, const Tensor& k, const Options& options) {
  TORCH_CHECK(!options.is_causal || q.size(2) == k.size(2), "causal attention of ", q.size(2), " queries over ",
              k.size(2), " keys is not emulated");
}

// [b, g, s, d] -> [b, n, s, d]
Tensor for_all_heads(const Tensor& kv, const Tensor& q) {
  const int64_t share = q.size(1) / kv.size(1);
  return share == 1 ? kv : kv.repeat_interleave(share, 1);
}

// The reverse: adds up the gradients of heads that share a key or value.
Tensor of_shared_heads(const Tensor& grad, const Tensor& kv) {
  if (grad.size(1) == kv.size(1)) return grad;
  return grad.unflatten(1, {kv.size(1), grad.size(1) / kv.size(1)}).sum(2);
}

std::pair<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  if (q.numel() == 0 || k.numel() == 0) {
    const auto floats = q.options().dtype(at::kFloat);
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    return {at::zeros_like(q), at::full({q.size(0), q.size(1), q.size(2)}, kNothing, floats)};
  }
  check_lengths(q, k, options);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, for_all_heads(k, q), for_all_heads(v, q), 0.0, options.is_causal, {}, options.scale);
  return {out, lse};
}

struct Saved {
  Tensor grad_out, q, k, v, out, lse;
};

Saved saved_of(const Arguments& arguments) {
  return {arguments.tensor("grad_out"), arguments.tensor("query"), arguments.tensor("key"),
          arguments.tensor("value"),    arguments.tensor("out"),   arguments.tensor("logsumexp")};
}

Gradients attend_backward(const Saved& saved, const Options& options) {
  check_lengths(saved.q, saved.k, options);
  const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      saved.grad_out, saved.q, for_all_heads(saved.k, saved.q), for_all_heads(saved.v, saved.q), saved.out, saved.lse,
      0.0, options.is_causal, {}, options.scale);
  return {dq, of_shared_heads(dk, saved.k), of_shared_heads(dv, saved.v)};
}

// ---- [b, n, s, d]: scaled_dot_product_attention through flash and through cuDNN

Stack flash_forward(const Arguments& arguments) {
  const auto [out, lse] = attend(arguments.tensor("query"), arguments.tensor("key"), arguments.tensor("value"),
                                 options_of(arguments));
  return {out, lse};
}

Stack flash_backward(const Arguments& arguments) {
  const auto [dq, dk, dv] = attend_backward(saved_of(arguments), options_of(arguments));
  return {dq, dk, dv};
}

// cuDNN's log-sum-exp is [b, n, s, 1].
Stack cudnn_forward(const Arguments& arguments) {
  const Tensor bias = arguments.optional_tensor("attn_bias");
  TORCH_CHECK(!bias.defined(), "cuDNN attention with a bias is not emulated");
  Stack results = flash_forward(arguments);
  results[1] = results[1].toTensor().unsqueeze(-1);
  return results;
}

Stack cudnn_backward(const Arguments& arguments) {
  Saved saved = saved_of(arguments);
  if (saved.lse.dim() == 4) saved.lse = saved.lse.squeeze(-1);
  const auto [dq, dk, dv] = attend_backward(saved, options_of(arguments));
  return {dq, dk, dv};
}

// The allocations of the host code around cuDNN's graphs; the graphs themselves need the library.
Stack cudnn_forward_results(const Arguments& arguments) {
  const Tensor q = arguments.tensor("query"), k = arguments.tensor("key");
  const auto floats = q.options().dtype(at::kFloat), longs = q.options().dtype(at::kLong);
  const Tensor lse = at::empty({q.size(0), q.size(1), q.size(2), 1}, floats);
  return {at::empty_like(q),   lse,       Tensor(), Tensor(), q.size(2), k.size(2), at::empty({}, longs),
          at::empty({}, longs), Tensor()};
}

Stack cudnn_backward_results(const Arguments& arguments) {
  return {at::empty_like(arguments.tensor("query")), at::empty_like(arguments.tensor("key")),
          at::empty_like(arguments.tensor("value"))};
}

// The workspace of the backward graph, which run_cudnn_SDP_bprop (ATen/native/cudnn/MHA.cpp) asks the caching allocator
// for. The sizes and their sources are those of memo/spec/attention_workspace.py; a test compares the two.
int64_t cudnn_backward_workspace_bytes(const Arguments& arguments) {
  const Tensor q = arguments.tensor("query"), k = arguments.tensor("key");
  if (q.numel() == 0 || k.numel() == 0) return 0;
  const int64_t rows = q.size(0) * q.size(1) * q.size(2);
  const int64_t dq_and_sums = rows * (q.size(3) + 1) * 4;
  const int64_t dk_of_all_heads = q.size(0) * q.size(1) * k.size(2) * k.size(3) * k.itemsize();
  return dq_and_sums + (q.size(1) == k.size(1) ? 0 : 2 * dk_of_all_heads);
}

// ---- [b, s, n, d], or packed documents [t, n, d] with their boundaries; log-sum-exp [b, n, s] or [n, t]

Tensor heads_first(const Tensor& tokens) { return tokens.transpose(1, 2); }

// The begins of the documents, and the end of the last one; empty: not packed.
std::vector<int64_t> boundaries(const Tensor& cumulative) {
  if (!cumulative.defined() || cumulative.numel() == 0) return {};
  const auto* const values = cumulative.data_ptr<int32_t>();
  return {values, values + cumulative.numel()};
}

// [t, n, d] -> [1, n, s, d] of one document
Tensor document(const Tensor& tokens, int64_t begin, int64_t end) {
  return tokens.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
}

void put_document(const Tensor& tokens, int64_t begin, int64_t end, const Tensor& heads) {
  tokens.slice(0, begin, end).copy_(heads.squeeze(0).transpose(0, 1));
}

std::pair<Tensor, Tensor> attend_tokens(const Arguments& arguments) {
  const Tensor q = arguments.tensor("query"), k = arguments.tensor("key"), v = arguments.tensor("value");
  const Options options = options_of(arguments);
  const auto of_q = boundaries(arguments.optional_tensor("cum_seq_q"));
  const auto of_k = boundaries(arguments.optional_tensor("cum_seq_k"));
  if (of_q.empty()) {
    const auto [out, lse] = attend(heads_first(q), heads_first(k), heads_first(v), options);
    return {heads_first(out), lse};
  }
  TORCH_CHECK(of_q.back() == q.size(0), "the boundaries end at ", of_q.back(), " of ", q.size(0), " tokens");
  const Tensor out = at::empty(q.sizes(), q.options());
  const Tensor lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  for (size_t i = 0; i + 1 < of_q.size(); ++i) {
    if (of_q[i] == of_q[i + 1]) continue;
    const auto [some_out, some_lse] = attend(document(q, of_q[i], of_q[i + 1]), document(k, of_k[i], of_k[i + 1]),
                                             document(v, of_k[i], of_k[i + 1]), options);
    put_document(out, of_q[i], of_q[i + 1], some_out);
    lse.slice(1, of_q[i], of_q[i + 1]).copy_(some_lse.squeeze(0));
  }
  return {out, lse};
}

Stack tokens_forward(const Arguments& arguments) {
  const auto [out, lse] = attend_tokens(arguments);
  return {out, lse};
}

Stack tokens_forward_into(const Arguments& arguments) {
  const auto [out, lse] = attend_tokens(arguments);
  arguments.tensor("out").copy_(out);
  return {lse};
}

Stack tokens_backward(const Arguments& arguments) {
  const Saved saved = saved_of(arguments);
  const Options options = options_of(arguments);
  const auto of_q = boundaries(arguments.optional_tensor("cum_seq_q"));
  const auto of_k = boundaries(arguments.optional_tensor("cum_seq_k"));
  if (of_q.empty()) {
    const auto [dq, dk, dv] =
        attend_backward({heads_first(saved.grad_out), heads_first(saved.q), heads_first(saved.k), heads_first(saved.v),
                         heads_first(saved.out), saved.lse},
                        options);
    return {heads_first(dq), heads_first(dk), heads_first(dv)};
  }
  const Tensor dq = at::zeros(saved.q.sizes(), saved.q.options());
  const Tensor dk = at::zeros(saved.k.sizes(), saved.k.options());
  const Tensor dv = at::zeros(saved.v.sizes(), saved.v.options());
  for (size_t i = 0; i + 1 < of_q.size(); ++i) {
    const int64_t begin = of_q[i], end = of_q[i + 1], from = of_k[i], to = of_k[i + 1];
    if (begin == end || from == to) continue;
    const auto [some_dq, some_dk, some_dv] = attend_backward(
        {document(saved.grad_out, begin, end), document(saved.q, begin, end), document(saved.k, from, to),
         document(saved.v, from, to), document(saved.out, begin, end), saved.lse.slice(1, begin, end).unsqueeze(0)},
        options);
    put_document(dq, begin, end, some_dq);
    put_document(dk, from, to, some_dk);
    put_document(dv, from, to, some_dv);
  }
  return {dq, dk, dv};
}

}  // namespace

const std::map<std::string, Numbers>& attention_numbers() {
  static const std::map<std::string, Numbers> numbers = {
      {"aten::_scaled_dot_product_flash_attention", flash_forward},
      {"aten::_scaled_dot_product_flash_attention_backward", flash_backward},
      {"aten::_scaled_dot_product_cudnn_attention", cudnn_forward},
      {"aten::_scaled_dot_product_cudnn_attention_backward", cudnn_backward},
      {"aten::_flash_attention_forward", tokens_forward},
      {"aten::_flash_attention_forward_no_dropout_inplace", tokens_forward_into},
      {"aten::_flash_attention_backward", tokens_backward},
  };
  return numbers;
}

const std::map<std::string, MakeResults>& attention_results() {
  static const std::map<std::string, MakeResults> results = {
      {"aten::_scaled_dot_product_cudnn_attention", cudnn_forward_results},
      {"aten::_scaled_dot_product_cudnn_attention_backward", cudnn_backward_results},
  };
  return results;
}

const std::map<std::string, ScratchBytes>& attention_scratch_bytes() {
  static const std::map<std::string, ScratchBytes> bytes = {
      {"aten::_scaled_dot_product_cudnn_attention_backward", cudnn_backward_workspace_bytes},
  };
  return bytes;
}

}  // namespace emulated
