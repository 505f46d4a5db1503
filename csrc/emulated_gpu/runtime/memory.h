// The addresses of device memory, managed memory and pinned host memory, and the bytes in use on each device.
//
// All of it is memory of the host: anonymous pages, which take memory only after they are touched. So a device has 80
// GiB on a machine that has less, as long as the program does not fill them. Without numbers nothing fills device
// memory, and large pinned memory, which the program itself may fill, is one piece of real memory mapped repeatedly.
//
// Rules from CUDA's reference: device memory is handed out in granules of 2 MiB; a request larger than the free memory
// of the device is cudaErrorMemoryAllocation; managed memory is bounded by the host, not by the device; virtual
// addresses (cuMemAddressReserve) can only be used where physical memory is mapped and access was granted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "emulator.h"

namespace emulated {

constexpr size_t kGranuleBytes = size_t{2} << 20;

enum class Kind { kDevice, kManaged, kPinned, kRegistered };

struct Block {
  size_t num_bytes;
  Kind kind;
  int device;  // of device and managed memory
};

struct Capacity {
  size_t device_bytes;
  size_t context_bytes;  // of each device, already in use
  size_t host_bytes;     // that can be pinned; 0: as many as this machine allows
  bool without_numbers;
};

// Callers hold the mutex of the process.
class Memory {
 public:
  explicit Memory(const Capacity& capacity) : capacity_(capacity) {}

  // nullptr: the device or the host does not have that much left.
  void* allocate(size_t num_bytes, Kind kind, int device);
  // Returns the freed range; nullopt: the address is not the begin of such a block.
  std::optional<Range> free(void* address, bool is_host_memory);

  bool is_pinned_in_part(const void* address, size_t num_bytes) const;
  // False: the host does not have that much. Without numbers, the old content is lost.
  bool register_host(void* address, size_t num_bytes);
  std::optional<Range> unregister_host(void* address);

  // The block that contains the address; nullptr: memory unknown to CUDA.
  const Block* find(const void* address) const;
  // Whether all of these bytes are in blocks, possibly in several adjacent ones.
  bool covers(const Range& range) const;

  size_t free_bytes(int device) const;
  size_t device_bytes() const { return capacity_.device_bytes; }
  size_t host_bytes() const { return capacity_.host_bytes; }
  // Bytes in use by place: each device that was used, and pinned memory of the host.
  std::map<std::string, int64_t> taken() const;

  // Virtual memory of the driver. Handles are physical memory; they have no content while they are not mapped.
  void* reserve(size_t num_bytes);
  void unreserve(void* address, size_t num_bytes);
  uint64_t create(size_t num_bytes, int device);  // 0: the device does not have that much left
  bool release(uint64_t handle);
  bool map(void* address, size_t num_bytes, uint64_t handle);
  bool grant(void* address, size_t num_bytes);  // reads and writes
  bool unmap(void* address, size_t num_bytes);

 private:
  struct Physical {
    size_t num_bytes;
    int device;
    int num_mapped;
    bool is_released;
  };

  bool take(int device, size_t num_bytes);
  bool take_host(size_t num_bytes);
  void* map_host(void* where, size_t num_bytes) const;
  void release_if_unused(std::map<uint64_t, Physical>::iterator physical);
  bool is_reserved(uintptr_t begin, size_t num_bytes) const;

  Capacity capacity_;
  size_t pinned_bytes_ = 0;
  std::map<int, size_t> used_bytes_;    // by device
  std::map<uintptr_t, Block> blocks_;   // by where they begin
  std::map<uintptr_t, size_t> reserved_;
  std::map<uintptr_t, uint64_t> mapped_;  // handles by where they are mapped
  std::map<uint64_t, Physical> physical_;
  uint64_t next_handle_ = 1;
};

}  // namespace emulated
