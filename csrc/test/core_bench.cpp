// Nanoseconds that the core adds to one request and its free: the median of all iterations.
//
// usage: core_bench [iterations]
// benchmarks/allocator_overhead.py builds and runs it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "../core/planned_core.h"

using namespace memo;

namespace {

constexpr int64_t kBlockBytes = 1024;
constexpr int64_t kRequests = 4000;  // of one phase

// Requests in a circle over num_live + 1 addresses, so that num_live blocks are alive beside the one that moves.
Plan circle(int64_t num_live) {
  Plan plan;
  plan.alignment_bytes = 64;
  plan.arena_bytes = (num_live + 1) * kBlockBytes;
  for (int64_t i = 0; i < kRequests; ++i) plan.requests.push_back({kBlockBytes, i % (num_live + 1) * kBlockBytes});
  plan.phase_ends = {kRequests};
  return plan;
}

double measure_ns(int num_iterations, Mode mode, int64_t num_live, size_t num_bytes) {
  const Plan plan = circle(num_live);
  std::vector<char> arena(static_cast<size_t>(plan.arena_bytes));
  PlannedCore core;
  core.set_arena(arena.data(), arena.size());
  core.load(plan);
  core.set_mode(mode);
  std::vector<void*> live(static_cast<size_t>(num_live), nullptr);
  std::vector<double> seconds;
  for (int iteration = 0; iteration < num_iterations; ++iteration) {
    core.begin_iteration();
    core.mark(0);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < kRequests; ++i) {
      void* block = core.request(num_bytes);
      if (block == nullptr) {
        block = &live[0];  // stands for a native block
        core.note_native(block, num_bytes);
        core.release(block);
        continue;
      }
      std::swap(block, live[static_cast<size_t>(i % num_live)]);
      if (block != nullptr) core.release(block);
    }
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    for (void*& block : live) {
      if (block != nullptr) core.release(std::exchange(block, nullptr));
    }
    core.end_iteration();
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle * 1e9 / kRequests;
}

}  // namespace

int main(int argc, char** argv) {
  const int iterations = std::max(1, argc > 1 ? std::atoi(argv[1]) : 500);
  const auto print = [](const char* what, double ns) { std::printf("%-34s %7.1f ns\n", what, ns); };
  print("passthrough", measure_ns(iterations, Mode::kPassthrough, 1, kBlockBytes));
  print("recorded", measure_ns(iterations, Mode::kRecord, 1, kBlockBytes));
  print("fallback, wrong size", measure_ns(iterations, Mode::kPlanned, 1, kBlockBytes + 1));
  for (int64_t num_live : {1, 10, 100, 1000}) {
    char what[64];
    std::snprintf(what, sizeof what, "planned, %lld live blocks", static_cast<long long>(num_live));
    print(what, measure_ns(iterations, Mode::kPlanned, num_live, kBlockBytes));
  }
}
