// Two arenas: one of addresses that fault, for device pointers, and one of the memory itself. And
// host memory that counts as pinned.
#include "sim.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace sim {
namespace {

struct Arenas {
  char* faulting;
  char* readable;
  size_t bytes;
};

const Arenas& arenas() {
  static const Arenas mapped = [] {
    const size_t bytes = bytes_per_device() * device_count();
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* faulting = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
    void* readable = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(
        faulting != MAP_FAILED && readable != MAP_FAILED,
        "sim: no ", 2 * bytes, " bytes of addresses; set SIM_MEMORY_GIB to fewer");
    madvise(readable, bytes, MADV_DONTFORK);
    return Arenas{static_cast<char*>(faulting), static_cast<char*>(readable), bytes};
  }();
  return mapped;
}

constexpr size_t kPage = 4096;

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;
};

Pinned& pinned() {
  static auto* one = new Pinned;
  return *one;
}

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<char*>(pointer));
  }
  std::free(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    void* pointer = nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, posix_memalign(&pointer, kPage, (bytes + kPage - 1) / kPage * kPage) == 0,
        "sim: no ", bytes, " bytes of host memory to pin");
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &unpin, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

size_t bytes_per_device() {
  static const size_t bytes = static_cast<size_t>(setting("SIM_MEMORY_GIB", 16)) << 30;
  return bytes;
}

char* host(const void* pointer) {
  TORCH_CHECK(
      pointer == nullptr || device_of(pointer) >= 0, "sim: ", pointer, " is no device address");
  if (pointer == nullptr) {
    return nullptr;
  }
  return arenas().readable + (static_cast<const char*>(pointer) - arenas().faulting);
}

DeviceIndex device_of(const void* pointer) {
  const auto at = static_cast<const char*>(pointer) - arenas().faulting;
  if (at < 0 || static_cast<size_t>(at) >= arenas().bytes) {
    return -1;
  }
  return static_cast<DeviceIndex>(at / bytes_per_device());
}

char* device_base(DeviceIndex device) {
  return arenas().faulting + device * bytes_per_device();
}

bool in_host_arena(const void* pointer) {
  const auto at = static_cast<const char*>(pointer) - arenas().readable;
  return at >= 0 && static_cast<size_t>(at) < arenas().bytes;
}

c10::Allocator* pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return one;
}

bool is_pinned(const void* pointer) {
  const auto* at = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().blocks.upper_bound(at);
  if (after == pinned().blocks.begin()) {
    return false;
  }
  const auto& [start, bytes] = *std::prev(after);
  return at < start + bytes;
}

}  // namespace sim
