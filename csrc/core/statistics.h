// How the requests were served. Plain numbers: memo/allocator/library.py reads these structs as they lie in memory.
#pragma once

#include <cstdint>

namespace memo {

// Why a request of a planned phase was not served as planned.
enum class Reason : int64_t {
  kSize,       // not the size that the plan has next
  kThread,     // made by a thread other than the one that marked the phase
  kStream,     // made while another stream than the arena's was current
  kOverlap,    // a live block overlaps its planned place
  kExhausted,  // the phase has no request left
  kBlock,      // more than the free part of attention's block
};
constexpr int64_t kNumReasons = 6;
constexpr int64_t kNumNamed = 4;  // of each reason, this many are kept in full

struct Mismatch {
  int64_t phase;
  int64_t position;        // in the phase
  int64_t expected_bytes;  // 0: nothing was expected
  int64_t found_bytes;
};

struct Statistics {
  int64_t requests;  // of at least min_bytes, in a planned phase = hits + native + all fallbacks
  int64_t hits;      // served from the arena: at its address, or in attention's block
  int64_t native;    // planned to be native
  int64_t unasked;   // planned, but the phase ended without them
  int64_t outside;   // of at least min_bytes, outside every planned phase: evaluation, loading of data
  int64_t arena_bytes;
  int64_t live_blocks;
  int64_t live_bytes;  // of planned blocks
  int64_t peak_bytes;  // the largest live_bytes
  int64_t fallbacks[kNumReasons];
  Mismatch first[kNumReasons][kNumNamed];
};

}  // namespace memo
