// Random numbers: each CUDA generator is followed by a CPU generator, so a run's numbers equal the CPU's.
//
// A CUDA generator is a seed and an offset into its sequence; the real host code advances the offset. A CPU generator
// has no such offset, so the follower's state is stored for each (seed, offset) that was used: a program that resets a
// generator, as recomputation does, gets the same numbers again.
#include <deque>
#include <mutex>
#include <utility>

#include "operator.h"

namespace emulated {
namespace {

constexpr size_t kMostStates = 4096;
constexpr uint64_t kOddNumber = 0x9E3779B97F4A7C15ull;  // spreads offsets that were never used over seeds

class Followers {
 public:
  struct Place {
    uint64_t seed, offset;
    bool operator<(const Place& other) const {
      return std::pair(seed, offset) < std::pair(other.seed, other.offset);
    }
  };

  static Place place_of(const at::Generator& cuda) {
    const auto* const generator = cuda.get<at::CUDAGeneratorImpl>();
    return {generator->current_seed(), generator->philox_offset_per_thread()};
  }

  // The CPU generator at the position that the CUDA generator has at `place`.
  at::Generator at(const at::Generator& cuda, const Place& place) {
    Follower& follower = followers_[cuda.unsafeGetGeneratorImpl()];
    const bool has_moved = follower.next.seed != place.seed || follower.next.offset != place.offset;
    if (!follower.cpu.defined() || has_moved || place.offset == 0) {
      const auto met = states_.find(place);
      follower.cpu = met != states_.end() ? met->second.clone()
                                          : at::detail::createCPUGenerator(place.seed + place.offset * kOddNumber);
    } else {
      remember(place, follower.cpu);
    }
    return follower.cpu;
  }

  void has_drawn(const at::Generator& cuda) { followers_[cuda.unsafeGetGeneratorImpl()].next = place_of(cuda); }

 private:
  struct Follower {
    at::Generator cpu;
    Place next{};
  };

  void remember(const Place& place, const at::Generator& state) {
    if (!states_.emplace(place, state.clone()).second) return;
    order_.push_back(place);
    if (order_.size() <= kMostStates) return;
    states_.erase(order_.front());
    order_.pop_front();
  }

  std::map<c10::GeneratorImpl*, Follower> followers_;
  std::map<Place, at::Generator> states_;
  std::deque<Place> order_;
};

at::Generator generator_of(const Operator& op, const Stack& arguments) {
  if (const auto index = op.schema().argumentIndexWithName("generator")) {
    const c10::IValue& given = arguments[static_cast<size_t>(*index)];
    if (given.isGenerator()) return given.toGenerator();
  }
  return at::globalContext().defaultGenerator(c10::Device(at::kCUDA, c10::cuda::current_device()));
}

bool reads_device(const Operator& op, const Stack& arguments) {
  bool found = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& tensor) { found |= tensor.is_cuda() && !op.is_written[i]; });
  }
  return found;
}

}  // namespace

// Numbers are drawn at once, in the order of the program, and written in the order of the stream.
void call_random(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  if (emulated_is_mute()) return op.real.callBoxed(op.handle, keys, stack);
  static std::mutex mutex;
  static auto* const followers = new Followers;
  const std::lock_guard<std::mutex> lock(mutex);
  const at::Generator cuda =
      generator_of(op, torch::jit::last(*stack, op.schema().arguments().size()).vec());
  const Followers::Place place = Followers::place_of(cuda);
  const Call call = begin_call(op, keys, stack);
  if (!call.has_numbers) return queue_call(op, call, {});
  if (reads_device(op, call.arguments)) {
    emulated_wait_for_stream(call.stream, "emulator: random numbers that depend on data");
  }
  Stack drawn = call.on_cpu;
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (!op.is_written[i]) continue;
    each_tensor(call.on_cpu[i], [&](const at::Tensor& tensor) {
      drawn[i] = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
    });
  }
  if (const auto index = op.schema().argumentIndexWithName("generator")) {
    drawn[static_cast<size_t>(*index)] = followers->at(cuda, place);
  }
  {
    const PlainDispatch plain;
    op.handle.callBoxed(drawn);
  }
  followers->has_drawn(cuda);
  Stack places;
  for (const c10::IValue& result : call.results) places.push_back(for_closure(result));
  const auto write = [&op, places, drawn] {
    for (size_t i = 0; i < places.size(); ++i) store(places[i], drawn[i], op.name);
  };
  queue_call(op, call, write);
}

}  // namespace emulated
