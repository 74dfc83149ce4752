// The caching allocator of device memory, with the rules of CUDA's.
//
// A freed block serves its own stream again at once; other streams must have been recorded. A block
// may be written to from the next allocation of its stream on, not before: its stream may wait for
// those that still read first, as FSDP2's do. With that allocation, whatever its size, all that
// was freed is filled with NaN, in the order of the stream, so that other reads show.
#include "sim.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <vector>

namespace sim {
namespace {

constexpr size_t kAlign = 512;
constexpr size_t kSmall = 1 << 20;    // smaller blocks share segments
constexpr size_t kSegment = 2 << 20;  // segments are multiples of it
constexpr int kPoison = 0xFF;         // NaN for every floating type, -1 for integers

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Block {
  char* pointer;
  size_t bytes;
  Queue* queue;
  bool small;
  bool free = false;
  Block* before = nullptr;  // neighbours in its segment
  Block* after = nullptr;
  std::set<Queue*> used_by = {};
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return std::make_pair(a->bytes, a->pointer) < std::make_pair(b->bytes, b->pointer);
  }
};

using Pool = std::set<Block*, Smaller>;
using Spans = std::vector<std::pair<char*, size_t>>;

// Memory of one device; its functions are called with the allocator's lock held.
class Memory {
 public:
  explicit Memory(DeviceIndex device)
      : gaps_{{device_base(device), bytes_per_device()}} {}

  Block* take(size_t bytes, Queue* queue) {
    poison_freed(queue);
    const bool small = bytes <= kSmall;
    Pool& pool = pools_[{queue, small}];
    Block wanted{nullptr, bytes, queue, small};
    auto found = pool.lower_bound(&wanted);
    Block* block = nullptr;
    if (found != pool.end()) {
      block = *found;
      pool.erase(found);
    } else {
      block = segment(round_up(bytes, kSegment), queue, small);
    }
    if (block == nullptr) {
      return nullptr;
    }
    if (block->bytes - bytes >= (small ? kAlign : kSmall)) {
      split(block, bytes);
    }
    block->free = false;
    change(stats.allocated_bytes, block->bytes, true);
    change(stats.active_bytes, block->bytes, true);
    change(stats.allocation, 1, true);
    return block;
  }

  void give_back(Block* block) {
    change(stats.allocated_bytes, block->bytes, false);
    change(stats.allocation, 1, false);
    if (block->used_by.empty()) {
      release(block);
      return;
    }
    Pending pending{block, {}};
    for (Queue* queue : block->used_by) {
      pending.marks.push_back(queue->mark());
    }
    block->used_by.clear();
    pending_.push_back(std::move(pending));
  }

  // Blocks whose other streams have come past the point at which they were freed.
  void release_pending() {
    for (auto& pending : pending_) {
      const bool done = std::all_of(
          pending.marks.begin(), pending.marks.end(), [](auto& mark) { return mark->is_set(); });
      if (done) {
        release(pending.block);
        pending.block = nullptr;
      }
    }
    pending_.erase(
        std::remove_if(pending_.begin(), pending_.end(), [](auto& p) { return !p.block; }),
        pending_.end());
  }

  void empty() {
    release_pending();
    for (auto& [key, pool] : pools_) {
      for (auto it = pool.begin(); it != pool.end();) {
        Block* block = *it;
        if (block->before != nullptr || block->after != nullptr) {
          ++it;
          continue;
        }
        it = pool.erase(it);
        forget_freed(block);
        madvise(host(block->pointer), block->bytes, MADV_DONTNEED);
        change(stats.reserved_bytes, block->bytes, false);
        change(stats.segment, 1, false);
        gap(block->pointer, block->bytes);
        delete block;
      }
    }
  }

  c10::CachingDeviceAllocator::DeviceStats stats;

 private:
  struct Pending {
    Block* block;
    std::vector<std::shared_ptr<Mark>> marks;
  };

  static void change(c10::CachingAllocator::StatArray& stat, size_t by, bool more) {
    more ? stat[0].increase(by) : stat[0].decrease(by);
  }

  static void poison(Queue* queue, Spans spans) {
    queue->push("freed memory", [spans = std::move(spans)] {
      for (const auto& [at, bytes] : spans) {
        std::memset(at, kPoison, bytes);
      }
    });
  }

  void poison_freed(Queue* queue) {
    auto found = freed_.find(queue);
    if (found != freed_.end()) {
      poison(queue, std::move(found->second));
      freed_.erase(found);
    }
  }

  // Of a segment that may serve another stream next.
  void forget_freed(const Block* block) {
    const char* start = host(block->pointer);
    Spans& spans = freed_[block->queue];
    auto inside = [&](const auto& span) {
      return span.first >= start && span.first < start + block->bytes;
    };
    spans.erase(std::remove_if(spans.begin(), spans.end(), inside), spans.end());
  }

  Block* segment(size_t bytes, Queue* queue, bool small) {
    auto found = std::find_if(
        gaps_.begin(), gaps_.end(), [bytes](const auto& gap) { return gap.second >= bytes; });
    if (found == gaps_.end()) {
      return nullptr;
    }
    auto* block = new Block{found->first, bytes, queue, small};
    const size_t left = found->second - bytes;
    gaps_.erase(found);
    if (left > 0) {
      gaps_[block->pointer + bytes] = left;
    }
    change(stats.reserved_bytes, bytes, true);
    change(stats.segment, 1, true);
    poison(queue, {{host(block->pointer), bytes}});
    return block;
  }

  void gap(char* pointer, size_t bytes) {
    auto next = gaps_.lower_bound(pointer);
    if (next != gaps_.end() && next->first == pointer + bytes) {
      bytes += next->second;
      next = gaps_.erase(next);
    }
    if (next != gaps_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == pointer) {
        previous->second += bytes;
        return;
      }
    }
    gaps_[pointer] = bytes;
  }

  void split(Block* block, size_t bytes) {
    auto* rest = new Block{block->pointer + bytes, block->bytes - bytes, block->queue, block->small};
    rest->before = block;
    rest->after = block->after;
    if (rest->after != nullptr) {
      rest->after->before = rest;
    }
    block->after = rest;
    block->bytes = bytes;
    rest->free = true;
    pools_[{rest->queue, rest->small}].insert(rest);
  }

  void release(Block* block) {
    change(stats.active_bytes, block->bytes, false);
    freed_[block->queue].emplace_back(host(block->pointer), block->bytes);
    Pool& pool = pools_[{block->queue, block->small}];
    if (block->after != nullptr && block->after->free) {
      pool.erase(block->after);
      swallow(block);
    }
    if (block->before != nullptr && block->before->free) {
      block = block->before;
      pool.erase(block);
      swallow(block);
    }
    block->free = true;
    pool.insert(block);
  }

  static void swallow(Block* block) {
    Block* next = block->after;
    block->bytes += next->bytes;
    block->after = next->after;
    if (block->after != nullptr) {
      block->after->before = block;
    }
    delete next;
  }

  std::map<std::pair<Queue*, bool>, Pool> pools_;
  std::map<char*, size_t> gaps_;
  std::vector<Pending> pending_;
  std::map<Queue*, Spans> freed_;  // of each stream, since its last allocation
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current_device();
    if (bytes == 0) {
      return {nullptr, as_device(device)};
    }
    Queue& queue = current_queue(device);
    bytes = round_up(bytes, kAlign);
    Block* block = taken(device, bytes, &queue);
    if (block == nullptr) {
      emptyCache({0, 0});
      block = taken(device, bytes, &queue);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, block != nullptr,
        "sim out of memory: tried to allocate ", bytes, " bytes on sim:", int(device), " of ",
        bytes_per_device(), "; SIM_MEMORY_GIB sets how much there is");
    return {block->pointer, block, &drop, as_device(device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    current_queue(current_device()).push("copy of an allocation", [=] {
      std::memcpy(host(to), host(from), bytes);
    });
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex device = 0; device < device_count(); ++device) {
      wait_for_device(device, "empty_cache", "");
      std::lock_guard<std::mutex> lock(mutex_);
      memory(device).empty();
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr || data.get_deleter() != &drop) {
      return;
    }
    auto* block = static_cast<Block*>(data.get_context());
    Queue* queue = &queue_of(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue != block->queue) {
      block->used_by.insert(queue);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return memory(device).stats;
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all_stats(device)) {
      (*stat)[0].reset_accumulated();
    }
  }

  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all_stats(device)) {
      (*stat)[0].reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t used = memory(device).stats.reserved_bytes[0].current;
    return {bytes_per_device() - used, bytes_per_device()};
  }

 private:
  static void drop(void* context);

  Block* taken(DeviceIndex device, size_t bytes, Queue* queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory(device).release_pending();
    return memory(device).take(bytes, queue);
  }

  Memory& memory(DeviceIndex device) {
    while (memories_.size() < static_cast<size_t>(device_count())) {
      memories_.push_back(std::make_unique<Memory>(memories_.size()));
    }
    return *memories_.at(device);
  }

  std::vector<c10::CachingAllocator::StatArray*> all_stats(DeviceIndex device) {
    auto& stats = memory(device).stats;
    return {&stats.allocation, &stats.segment, &stats.allocated_bytes, &stats.reserved_bytes,
            &stats.active_bytes};
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Memory>> memories_;
};

Allocator& the_allocator() {
  static auto* one = new Allocator;
  return *one;
}

void Allocator::drop(void* context) {
  if (forked()) {
    return;  // the memory is the parent's
  }
  auto* block = static_cast<Block*>(context);
  Allocator& self = the_allocator();
  std::lock_guard<std::mutex> lock(self.mutex_);
  Memory& memory = self.memory(block->queue->device);
  memory.give_back(block);
  memory.release_pending();
}

const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &the_allocator());
  return true;
}();

}  // namespace

c10::DeviceAllocator* allocator() {
  return &the_allocator();
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  the_allocator().recordStream(data, stream);
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "sim: this storage cannot be resized");
  DeviceScope scope(storage.device().index());
  c10::DataPtr fresh = the_allocator().allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) {
    the_allocator().copy_data(fresh.get(), impl->data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace sim
