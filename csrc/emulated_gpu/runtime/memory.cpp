#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

namespace emulated {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kPieceBytes = size_t{64} << 20;  // real memory behind all large pinned memory, without numbers

size_t rounded_up(size_t num_bytes, size_t granule) { return (std::max<size_t>(num_bytes, 1) + granule - 1) / granule * granule; }

void* map_pages(void* where, size_t num_bytes, int protection) {
  const int fixed = where == nullptr ? 0 : MAP_FIXED;
  void* pages = mmap(where, num_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

// Address space whose pieces are all the same real memory: a program may write anywhere in it and uses only one piece.
void* map_repeated(void* where, size_t num_bytes) {
  static const int piece = [] {
    const int file = memfd_create("emulated pinned memory", MFD_CLOEXEC);
    return file >= 0 && ftruncate(file, kPieceBytes) == 0 ? file : -1;
  }();
  char* const begin = static_cast<char*>(where != nullptr ? where : map_pages(nullptr, num_bytes, PROT_NONE));
  if (begin == nullptr) return nullptr;
  for (size_t done = 0; done < num_bytes; done += kPieceBytes) {
    const size_t size = std::min(kPieceBytes, num_bytes - done);
    void* const mapped = mmap(begin + done, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, piece, 0);
    if (mapped == MAP_FAILED) return nullptr;
  }
  return begin;
}

uintptr_t number_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

bool is_host_kind(Kind kind) { return kind == Kind::kPinned || kind == Kind::kRegistered; }

}  // namespace

bool Memory::take(int device, size_t num_bytes) {
  if (num_bytes > free_bytes(device)) return false;
  used_bytes_[device] += num_bytes;
  return true;
}

size_t Memory::free_bytes(int device) const {
  const auto found = used_bytes_.find(device);
  const size_t taken = capacity_.context_bytes + (found == used_bytes_.end() ? 0 : found->second);
  return capacity_.device_bytes > taken ? capacity_.device_bytes - taken : 0;
}

bool Memory::take_host(size_t num_bytes) {
  const bool fits = capacity_.host_bytes == 0 || num_bytes <= capacity_.host_bytes - pinned_bytes_;
  if (fits) pinned_bytes_ += num_bytes;
  return fits;
}

void* Memory::map_host(void* where, size_t num_bytes) const {
  const bool is_repeated = capacity_.without_numbers && num_bytes > kPieceBytes && number_of(where) % kPageBytes == 0;
  if (is_repeated) return map_repeated(where, num_bytes);
  return where != nullptr ? where : map_pages(nullptr, num_bytes, PROT_READ | PROT_WRITE);
}

std::map<std::string, int64_t> Memory::taken() const {
  std::map<std::string, int64_t> taken{{"pinned", static_cast<int64_t>(pinned_bytes_)}};
  for (const auto& [device, num_bytes] : used_bytes_) {
    taken["device " + std::to_string(device)] = static_cast<int64_t>(num_bytes + capacity_.context_bytes);
  }
  return taken;
}

void* Memory::allocate(size_t num_bytes, Kind kind, int device) {
  const size_t size = rounded_up(num_bytes, is_host_kind(kind) ? kPageBytes : kGranuleBytes);
  if (size < num_bytes) return nullptr;
  if (kind == Kind::kDevice ? !take(device, size) : kind == Kind::kPinned && !take_host(size)) return nullptr;
  void* address = is_host_kind(kind) ? map_host(nullptr, size) : map_pages(nullptr, size, PROT_READ | PROT_WRITE);
  if (address == nullptr) {
    if (kind == Kind::kDevice) used_bytes_[device] -= size;
    if (kind == Kind::kPinned) pinned_bytes_ -= size;
    return nullptr;
  }
  blocks_[number_of(address)] = {size, kind, device};
  return address;
}

std::optional<Range> Memory::free(void* address, bool is_host_memory) {
  const auto found = blocks_.find(number_of(address));
  if (found == blocks_.end() || (found->second.kind == Kind::kPinned) != is_host_memory) return std::nullopt;
  if (mapped_.count(found->first) != 0 || found->second.kind == Kind::kRegistered) return std::nullopt;
  const Block block = found->second;
  blocks_.erase(found);
  if (block.kind == Kind::kDevice) used_bytes_[block.device] -= block.num_bytes;
  if (block.kind == Kind::kPinned) pinned_bytes_ -= block.num_bytes;
  munmap(address, block.num_bytes);
  return bytes_at(address, block.num_bytes);
}

bool Memory::is_pinned_in_part(const void* address, size_t num_bytes) const {
  const auto after = blocks_.lower_bound(number_of(address));
  return find(address) != nullptr || (after != blocks_.end() && after->first < number_of(address) + num_bytes);
}

bool Memory::register_host(void* address, size_t num_bytes) {
  if (!take_host(num_bytes)) return false;
  if (map_host(address, num_bytes) == nullptr) {
    pinned_bytes_ -= num_bytes;
    return false;
  }
  blocks_[number_of(address)] = {num_bytes, Kind::kRegistered, 0};
  return true;
}

std::optional<Range> Memory::unregister_host(void* address) {
  const auto found = blocks_.find(number_of(address));
  if (found == blocks_.end() || found->second.kind != Kind::kRegistered) return std::nullopt;
  const Range range = bytes_at(address, found->second.num_bytes);
  pinned_bytes_ -= found->second.num_bytes;
  blocks_.erase(found);
  return range;
}

const Block* Memory::find(const void* address) const {
  auto found = blocks_.upper_bound(number_of(address));
  if (found == blocks_.begin()) return nullptr;
  --found;
  return number_of(address) < found->first + found->second.num_bytes ? &found->second : nullptr;
}

bool Memory::covers(const Range& range) const {
  for (uintptr_t at = range.begin; at < range.end;) {
    auto found = blocks_.upper_bound(at);
    if (found == blocks_.begin()) return false;
    --found;
    const uintptr_t end = found->first + found->second.num_bytes;
    if (at >= end) return false;
    at = end;
  }
  return true;
}

void* Memory::reserve(size_t num_bytes) {
  const size_t size = rounded_up(num_bytes, kGranuleBytes);
  void* address = map_pages(nullptr, size, PROT_NONE);
  if (address != nullptr) reserved_[number_of(address)] = size;
  return address;
}

void Memory::unreserve(void* address, size_t num_bytes) {
  if (reserved_.erase(number_of(address)) != 0) munmap(address, rounded_up(num_bytes, kGranuleBytes));
}

bool Memory::is_reserved(uintptr_t begin, size_t num_bytes) const {
  auto found = reserved_.upper_bound(begin);
  if (found == reserved_.begin()) return false;
  --found;
  return begin + num_bytes <= found->first + found->second;
}

uint64_t Memory::create(size_t num_bytes, int device) {
  if (!take(device, num_bytes)) return 0;
  physical_[next_handle_] = {num_bytes, device, 0, false};
  return next_handle_++;
}

// Released memory goes back to the device when its last mapping ends.
void Memory::release_if_unused(std::map<uint64_t, Physical>::iterator physical) {
  if (!physical->second.is_released || physical->second.num_mapped > 0) return;
  used_bytes_[physical->second.device] -= physical->second.num_bytes;
  physical_.erase(physical);
}

bool Memory::release(uint64_t handle) {
  const auto found = physical_.find(handle);
  if (found == physical_.end() || found->second.is_released) return false;
  found->second.is_released = true;
  release_if_unused(found);
  return true;
}

bool Memory::map(void* address, size_t num_bytes, uint64_t handle) {
  const auto found = physical_.find(handle);
  const uintptr_t begin = number_of(address);
  if (found == physical_.end() || !is_reserved(begin, num_bytes) || blocks_.count(begin) != 0) return false;
  blocks_[begin] = {num_bytes, Kind::kDevice, found->second.device};
  mapped_[begin] = handle;
  ++found->second.num_mapped;
  return true;
}

bool Memory::grant(void* address, size_t num_bytes) {
  return covers(bytes_at(address, num_bytes)) && mprotect(address, num_bytes, PROT_READ | PROT_WRITE) == 0;
}

bool Memory::unmap(void* address, size_t num_bytes) {
  const uintptr_t begin = number_of(address);
  const auto first = mapped_.lower_bound(begin), last = mapped_.lower_bound(begin + num_bytes);
  if (first == last) return false;
  for (auto it = first; it != last; ++it) {
    blocks_.erase(it->first);
    const auto physical = physical_.find(it->second);
    --physical->second.num_mapped;
    release_if_unused(physical);
  }
  mapped_.erase(first, last);
  return map_pages(address, num_bytes, PROT_NONE) != nullptr;  // fresh pages: the old content is lost
}

}  // namespace emulated
