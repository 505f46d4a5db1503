// The plan of one training iteration: its requests in order, phase by phase, and their addresses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace memo {

constexpr int64_t kNative = -1;  // offset of a request that the native allocator serves

struct Request {
  int64_t num_bytes;
  int64_t offset_bytes;  // from the start of the arena, or kNative
};

struct Plan {
  std::vector<Request> requests;
  std::vector<int64_t> phase_ends;  // phase i is requests[phase_ends[i - 1], phase_ends[i])
  int64_t min_bytes = 1;            // smaller requests are not in the plan
  int64_t alignment_bytes = 1;      // of every offset
  int64_t arena_bytes = 0;
  // By phase, whether its only request is a block for attention, see planned_core.h; empty: no phase has one.
  std::vector<bool> has_block = {};

  int64_t num_phases() const { return static_cast<int64_t>(phase_ends.size()); }
  int64_t begin_of(int64_t phase) const { return phase == 0 ? 0 : phase_ends[phase - 1]; }
  int64_t end_of(int64_t phase) const { return phase_ends[phase]; }
  bool is_attention(int64_t phase) const { return !has_block.empty() && has_block[static_cast<size_t>(phase)]; }
};

// The fault that makes the plan impossible to serve, if there is one. Two requests that share an address at one time
// are not searched for: they are found when the second is made.
inline std::optional<std::string> find_fault(const Plan& plan) {
  const auto fault = [](size_t index, const std::string& what) {
    return std::optional("request " + std::to_string(index) + " " + what);
  };
  int64_t last_end = 0;
  for (int64_t end : plan.phase_ends) {
    if (end < std::exchange(last_end, end)) return "the phases are not in order";
  }
  if (last_end != static_cast<int64_t>(plan.requests.size())) return "the phases do not hold all requests";
  if (!plan.has_block.empty() && plan.has_block.size() != plan.phase_ends.size()) {
    return "not every phase says whether it has a block";
  }
  for (int64_t phase = 0; phase < plan.num_phases(); ++phase) {
    if (!plan.is_attention(phase)) continue;
    const int64_t block = plan.begin_of(phase);
    if (plan.end_of(phase) != block + 1 || plan.requests[static_cast<size_t>(block)].offset_bytes == kNative) {
      return "phase " + std::to_string(phase) + " is attention's, but has not one block with a place";
    }
  }
  if (plan.arena_bytes < 0) return "arena_bytes is " + std::to_string(plan.arena_bytes);
  if (plan.alignment_bytes < 1) return "alignment_bytes is " + std::to_string(plan.alignment_bytes);
  for (size_t i = 0; i < plan.requests.size(); ++i) {
    const auto [num_bytes, offset] = plan.requests[i];
    if (num_bytes < 1 || num_bytes < plan.min_bytes) {
      return fault(i, "has " + std::to_string(num_bytes) + " bytes, but min_bytes is " + std::to_string(plan.min_bytes));
    }
    if (offset == kNative) continue;
    if (offset < 0 || offset % plan.alignment_bytes != 0) {
      return fault(i, "has offset " + std::to_string(offset) + ", not a multiple of alignment_bytes " +
                          std::to_string(plan.alignment_bytes));
    }
    if (num_bytes > plan.arena_bytes || offset > plan.arena_bytes - num_bytes) {
      return fault(i, "ends at " + std::to_string(offset) + " + " + std::to_string(num_bytes) +
                          ", behind arena_bytes " + std::to_string(plan.arena_bytes));
    }
  }
  return std::nullopt;
}

}  // namespace memo
