// What the files of the simulated accelerator share: devices, streams, memory, counters.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace sim {

using c10::DeviceIndex;

// Devices (device.cpp). Their number is SIM_DEVICES, two by default.
DeviceIndex device_count();
DeviceIndex current_device();
DeviceIndex exchange_device(DeviceIndex device);
inline c10::Device as_device(DeviceIndex index) {
  return c10::Device(c10::DeviceType::PrivateUse1, index);
}
// A device is the current one until the end of the scope; -1 leaves it as it is.
class DeviceScope {
 public:
  explicit DeviceScope(DeviceIndex device) : before_(exchange_device(device)) {}
  ~DeviceScope() {
    exchange_device(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const DeviceIndex before_;
};

// No warnings: kernels for Meta, and the CPU's for out arguments, warn of what is correct here.
class Silence {
 private:
  struct Handler final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

int64_t setting(const char* name, int64_t fallback);  // a number in the environment

// A random seed for one operator, drawn from the generator of a device (device.cpp).
uint64_t draw_seed(DeviceIndex device);

// A point in a stream's work: set when the stream has come to it.
class Mark {
 public:
  void set();
  void wait();
  bool is_set();
  std::chrono::steady_clock::time_point when();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point when_;
};

// The work of one stream: closures, run in order by a thread of its own.
class Queue {
 public:
  Queue(DeviceIndex device, int64_t stream);
  void push(std::string name, std::function<void()> work);
  std::shared_ptr<Mark> mark();
  void wait_for(std::shared_ptr<Mark> mark);
  void drain();
  bool idle();
  void end();  // runs what is left, then ends the thread; later work runs where it is pushed
  const DeviceIndex device;
  const int64_t stream;

 private:
  struct Job {
    std::string name;
    std::function<void()> work;
  };
  void loop();
  void run(Job& job);
  void pause();
  std::mutex mutex_;
  std::condition_variable pushed_, finished_;
  std::deque<Job> jobs_;
  uint64_t pushes_ = 0, runs_ = 0;
  bool ended_ = false;
  std::thread thread_;
  std::mt19937_64 random_;
  uint64_t random_of_ = 0;
};

// Streams (streams.cpp). Stream 0 is the default one, the others are of a pool.
c10::Stream current_stream(DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream pool_stream(DeviceIndex device, bool high_priority);
Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(DeviceIndex device);
void set_delay(int64_t microseconds, int64_t seed);
void end_streams();
bool forked();

// Waiting on the host: counted by kind and operator, without the GIL; raises what closures raised.
void wait_for_queue(Queue& queue, const char* kind, const std::string& name);
void wait_for_mark(Mark& mark, DeviceIndex device, const char* kind);
void wait_for_device(DeviceIndex device, const char* kind, const std::string& name);
void keep_error(DeviceIndex device, const std::string& message);
void raise_kept_error(DeviceIndex device);

// Addresses (arenas.cpp). Device pointers fault; `host` translates one for kernels and transports.
char* host(const void* pointer);
DeviceIndex device_of(const void* pointer);  // -1: of no device
char* device_base(DeviceIndex device);
size_t bytes_per_device();
bool in_host_arena(const void* pointer);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// Memory (memory.cpp).
c10::DeviceAllocator* allocator();
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
void resize_bytes(const c10::Storage& storage, size_t bytes);

// Counters (counters.cpp).
void count(const std::string& key, int64_t by = 1);
void count_wait(const char* kind, const std::string& name);

}  // namespace sim
