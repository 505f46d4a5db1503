// Reductions in the order of ranks, in the type of the elements (bfloat16 in fp32, rounded once at the end).
#include <algorithm>
#include <cstring>

#include "operation.h"

namespace emulated {
namespace {

enum Reduction { kSum, kProduct, kMax, kMin, kAverage };  // ncclRedOp_t

enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16 };  // ncclDataType_t

constexpr size_t kTypeBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // the last two are float8

template <class T>
struct Same {
  using Stored = T;
  static T wide(T value) { return value; }
  static T narrow(T value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static float wide(uint16_t value) {
    const uint32_t bits = uint32_t{value} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
  // To the nearest, to even in the middle.
  static uint16_t narrow(float value) {
    if (value != value) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

template <class T>
T combined(T a, T b, int reduction) {
  switch (reduction) {
    case kProduct: return static_cast<T>(a * b);
    case kMax: return std::max(a, b);
    case kMin: return std::min(a, b);
    default: return static_cast<T>(a + b);
  }
}

template <class Format>
void reduce_as(const std::vector<std::vector<char>>& parts, size_t offset, char* out, size_t count, int reduction) {
  using Stored = typename Format::Stored;
  for (size_t i = 0; i < count; ++i) {
    const auto element = [&](const std::vector<char>& part) {
      Stored stored;
      std::memcpy(&stored, part.data() + (offset + i) * sizeof stored, sizeof stored);
      return Format::wide(stored);
    };
    auto sum = element(parts.front());
    for (size_t rank = 1; rank < parts.size(); ++rank) sum = combined(sum, element(parts[rank]), reduction);
    if (reduction == kAverage) sum = static_cast<decltype(sum)>(sum / static_cast<decltype(sum)>(parts.size()));
    const Stored stored = Format::narrow(sum);
    std::memcpy(out + i * sizeof stored, &stored, sizeof stored);
  }
}

}  // namespace

size_t type_bytes(int type) { return kTypeBytes[type]; }

void reduce(const std::vector<std::vector<char>>& parts, size_t offset, char* out, size_t count, int type,
            int reduction) {
  if (reduction > kAverage) return emulated_kernel_failed("NCCL: a reduction of one's own is not emulated");
  switch (type) {
    case kInt8: return reduce_as<Same<int8_t>>(parts, offset, out, count, reduction);
    case kUint8: return reduce_as<Same<uint8_t>>(parts, offset, out, count, reduction);
    case kInt32: return reduce_as<Same<int32_t>>(parts, offset, out, count, reduction);
    case kUint32: return reduce_as<Same<uint32_t>>(parts, offset, out, count, reduction);
    case kInt64: return reduce_as<Same<int64_t>>(parts, offset, out, count, reduction);
    case kUint64: return reduce_as<Same<uint64_t>>(parts, offset, out, count, reduction);
    case kFloat32: return reduce_as<Same<float>>(parts, offset, out, count, reduction);
    case kFloat64: return reduce_as<Same<double>>(parts, offset, out, count, reduction);
    case kBfloat16: return reduce_as<Bfloat16>(parts, offset, out, count, reduction);
    default: emulated_kernel_failed("NCCL: reductions of float16 and float8 are not emulated");
  }
}

}  // namespace emulated
