#include "tensors.h"

#include <algorithm>

namespace emulated {
namespace {

constexpr size_t kMostRanges = 65536;  // of one tensor; beyond that one range covers all of it

at::Tensor one_for_closure(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_cuda() ? view_on_cpu(tensor) : tensor.clone();
}

}  // namespace

at::Tensor view_on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

c10::IValue for_closure(const c10::IValue& value) {
  if (value.isTensor()) return one_for_closure(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(one_for_closure(tensor));
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& entry : value.toListRef()) {
      list.push_back(entry.isTensor() ? std::optional<at::Tensor>(one_for_closure(entry.toTensor())) : std::nullopt);
    }
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& act) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) act(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) act(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& entry : value.toListRef()) each_tensor(entry, act);
  }
}

int64_t last_offset(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return -1;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last;
}

void append_ranges(const at::Tensor& tensor, std::vector<Range>& ranges) {
  if (emulated_checks_races() && tensor.defined() && tensor.is_cuda()) append_elements(tensor, ranges);
}

// Dims are taken from the smallest stride: as long as one continues where the last one ended, they form one run of
// elements; each further dim repeats the runs found so far.
void append_elements(const at::Tensor& tensor, std::vector<Range>& ranges) {
  if (tensor.numel() == 0) return;
  struct Dim {
    int64_t stride, size;
    bool operator<(const Dim& other) const { return stride < other.stride; }
  };
  std::vector<Dim> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) dims.push_back({tensor.stride(d), tensor.size(d)});
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // elements
  std::vector<int64_t> offsets{0};
  for (const Dim& dim : dims) {
    const bool continues = offsets.size() == 1 && dim.stride <= run;
    if (continues || offsets.size() * static_cast<size_t>(dim.size) > kMostRanges) {
      run += dim.stride * (dim.size - 1);
      continue;
    }
    std::vector<int64_t> repeated;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < dim.size; ++i) repeated.push_back(offset + i * dim.stride);
    }
    offsets.swap(repeated);
  }
  const auto base = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto item_bytes = static_cast<int64_t>(tensor.itemsize());
  for (const int64_t offset : offsets) {
    ranges.push_back({base + static_cast<uintptr_t>(offset * item_bytes),
                      base + static_cast<uintptr_t>((offset + run) * item_bytes)});
  }
}

void store(const c10::IValue& place, const c10::IValue& computed, const std::string& name) {
  std::vector<at::Tensor> to, from;
  each_tensor(place, [&](const at::Tensor& tensor) { to.push_back(tensor); });
  each_tensor(computed, [&](const at::Tensor& tensor) { from.push_back(tensor); });
  for (size_t i = 0; i < std::min(to.size(), from.size()); ++i) {
    if (from[i].numel() == 0 || to[i].data_ptr() == from[i].data_ptr()) continue;
    TORCH_CHECK(to[i].sizes() == from[i].sizes(), name, ": the CPU makes ", from[i].sizes(), ", CUDA ", to[i].sizes());
    to[i].copy_(from[i]);
  }
}

void* current_stream(const Stack& arguments, const Stack& results) {
  std::optional<c10::DeviceIndex> device;
  for (const Stack* values : {&arguments, &results}) {
    for (const c10::IValue& value : *values) {
      each_tensor(value, [&device](const at::Tensor& tensor) {
        if (!device && tensor.is_cuda()) device = tensor.device().index();
      });
    }
  }
  return c10::cuda::getCurrentCUDAStream(device.value_or(c10::cuda::current_device())).stream();
}

}  // namespace emulated
