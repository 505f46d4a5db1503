// The functions that a device implements for the plan, and the plain C functions by which Python controls it.
//
// Each device is a shared library of its own: core/, and one file that defines install(), take_arena(), give_arena(),
// bind_stream(), settle(), fill_with_nan() and has_managed_memory().
#pragma once

#include <cstddef>

#include "managed_memory.h"
#include "planned_core.h"

namespace memo {

// One for each process, never destroyed: c10's deleters are plain functions, and threads free blocks until the end.
PlannedCore& core();
ManagedMemory& managed_memory();

// --- defined by the device; errors are thrown

void install();  // once
char* take_arena(size_t num_bytes);
void give_arena(char* arena, size_t num_bytes);
StreamId bind_stream();  // binds the arena to the current stream
void settle(void* block);  // makes the current stream wait for a use of the block by another stream
void fill_with_nan(void* block, size_t num_bytes);
bool has_managed_memory();  // managed memory that may exceed the device's

}  // namespace memo

// --- called by memo/allocator/library.py. `const char*` is nullptr, or the error, valid until the next call.

#define MEMO_API extern "C" __attribute__((visibility("default")))

extern "C" __attribute__((visibility("default"))) const char memo_build_key[];  // as memo/allocator/build.py made it

MEMO_API const char* memo_install();
// has_block: 1 for each phase whose only request is a block for attention, else 0.
MEMO_API const char* memo_load_plan(const int64_t* sizes_and_offsets, int64_t num_requests, const int64_t* phase_ends,
                                    int64_t num_phases, const int64_t* has_block, int64_t min_bytes,
                                    int64_t alignment_bytes, int64_t arena_bytes);
// Stops planning; the arena is given back unless blocks in it are alive.
MEMO_API const char* memo_unload_plan();
MEMO_API const char* memo_set_mode(int mode);
MEMO_API void memo_begin_iteration();
MEMO_API void memo_mark(int64_t phase);
MEMO_API void memo_end_iteration();
// Makes the current stream wait for the end of one use of the block that record_stream has reported. If the current
// stream is the arena's and no other use is open, the block can be freed without an event. Blocks outside the arena are
// ignored.
MEMO_API void memo_settle(void* block);
MEMO_API int64_t memo_num_events();
MEMO_API void memo_copy_events(memo::Event* out);  // room for memo_num_events()
MEMO_API void memo_statistics(memo::Statistics* out);
MEMO_API void memo_reset_statistics();
// Errors of deleters since the last call.
MEMO_API const char* memo_take_fault();
MEMO_API void memo_set_poison(int is_on);
// Serves requests from managed memory, of which at most limit_bytes may be allocated at a time; see managed_memory.h.
MEMO_API const char* memo_open_managed(int64_t limit_bytes);
MEMO_API void memo_close_managed();
MEMO_API void memo_managed_use(memo::ManagedUse* out);
