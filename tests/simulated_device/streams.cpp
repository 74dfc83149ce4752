// Streams, marks in them, waiting and kept errors.
#include "sim.h"

#include <Python.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <vector>

namespace sim {
namespace {

constexpr int64_t kPool = 32;          // streams of each priority, as CUDA has
constexpr int64_t kHigh = 1 + kPool;   // the first one of high priority
constexpr int64_t kStreams = 1 + 2 * kPool;

std::atomic<int64_t> delay_us{setting("SIM_DELAY_US", 0)};
std::atomic<int64_t> delay_seed{setting("SIM_SEED", 0)};
std::atomic<bool> in_child{false};

struct Devices {
  std::vector<std::vector<std::unique_ptr<Queue>>> queues;
  std::vector<std::string> errors;
  std::mutex mutex;
};

// Never destroyed: memory is freed and streams are asked until the very end of the process.
Devices& devices() {
  static Devices* made = [] {
    auto* all = new Devices;
    all->errors.resize(device_count());
    all->queues.resize(device_count());
    for (DeviceIndex device = 0; device < device_count(); ++device) {
      for (int64_t stream = 0; stream < kStreams; ++stream) {
        all->queues[device].push_back(std::make_unique<Queue>(device, stream));
      }
    }
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    return all;
  }();
  return *made;
}

thread_local std::vector<int64_t> current;

std::vector<int64_t>& currents() {
  if (current.empty()) {
    current.resize(device_count());
  }
  return current;
}

// A closure may need the GIL that a waiting host thread holds.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace

void Mark::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  when_ = std::chrono::steady_clock::now();
  set_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool Mark::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

std::chrono::steady_clock::time_point Mark::when() {
  std::lock_guard<std::mutex> lock(mutex_);
  return when_;
}

Queue::Queue(DeviceIndex device_, int64_t stream_) : device(device_), stream(stream_) {}

void Queue::push(std::string name, std::function<void()> work) {
  TORCH_CHECK(
      !in_child, "sim devices cannot be used in a forked process: start it by spawn instead");
  Job job{std::move(name), std::move(work)};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_) {
      if (!thread_.joinable()) {
        thread_ = std::thread([this] { loop(); });
      }
      jobs_.push_back(std::move(job));
      ++pushes_;
      pushed_.notify_one();
      return;
    }
  }
  run(job);
}

std::shared_ptr<Mark> Queue::mark() {
  auto mark = std::make_shared<Mark>();
  push("event", [mark] { mark->set(); });
  return mark;
}

void Queue::wait_for(std::shared_ptr<Mark> mark) {
  push("wait for an event", [mark = std::move(mark)] { mark->wait(); });
}

void Queue::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t until = pushes_;
  finished_.wait(lock, [this, until] { return runs_ >= until; });
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return runs_ == pushes_;
}

void Queue::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    pushed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Queue::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    pushed_.wait(lock, [this] { return ended_ || !jobs_.empty(); });
    if (jobs_.empty()) {
      return;
    }
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    pause();
    run(job);
    job = Job();  // what a closure holds is let go before it counts as done
    lock.lock();
    ++runs_;
    finished_.notify_all();
  }
}

void Queue::run(Job& job) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::AutoGradMode no_grad(false);
  Silence silence;
  try {
    job.work();
  } catch (const c10::Error& error) {
    keep_error(device, job.name + " failed on sim: " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    keep_error(device, job.name + " failed on sim: " + error.what());
  }
}

void Queue::pause() {
  const int64_t most = delay_us;
  if (most <= 0) {
    return;
  }
  const uint64_t seed = 1 + static_cast<uint64_t>(delay_seed);
  if (random_of_ != seed) {
    random_of_ = seed;
    random_.seed(seed * 1000003 + device * 1009 + stream);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % (most + 1)));
}

c10::Stream current_stream(DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, as_device(device), currents().at(device));
}

c10::Stream exchange_stream(c10::Stream stream) {
  c10::Stream before = current_stream(stream.device_index());
  currents().at(stream.device_index()) = stream.id();
  return before;
}

c10::Stream pool_stream(DeviceIndex device, bool high_priority) {
  static std::atomic<int64_t> drawn{0};
  const int64_t id = (high_priority ? kHigh : 1) + drawn++ % kPool;
  return c10::Stream(c10::Stream::UNSAFE, as_device(device), id);
}

Queue& queue_of(const c10::Stream& stream) {
  return *devices().queues.at(stream.device_index()).at(stream.id());
}

Queue& current_queue(DeviceIndex device) {
  return *devices().queues.at(device).at(currents().at(device));
}

void set_delay(int64_t microseconds, int64_t seed) {
  delay_us = microseconds;
  delay_seed = seed;
}

void end_streams() {
  WithoutGil released;
  for (auto& queues : devices().queues) {
    for (auto& queue : queues) {
      queue->drain();  // all, before any ends: they wait for each other
    }
  }
  for (auto& queues : devices().queues) {
    for (auto& queue : queues) {
      queue->end();
    }
  }
}

bool forked() {
  return in_child;
}

void wait_for_queue(Queue& queue, const char* kind, const std::string& name) {
  count_wait(kind, name);
  {
    WithoutGil released;
    queue.drain();
  }
  raise_kept_error(queue.device);
}

void wait_for_mark(Mark& mark, DeviceIndex device, const char* kind) {
  count_wait(kind, "");
  {
    WithoutGil released;
    mark.wait();
  }
  raise_kept_error(device);
}

void wait_for_device(DeviceIndex device, const char* kind, const std::string& name) {
  count_wait(kind, name);
  {
    WithoutGil released;
    for (auto& queue : devices().queues.at(device)) {
      queue->drain();
    }
  }
  raise_kept_error(device);
}

void keep_error(DeviceIndex device, const std::string& message) {
  std::lock_guard<std::mutex> lock(devices().mutex);
  auto& kept = devices().errors.at(device);
  if (kept.empty()) {
    kept = message;
  }
}

void raise_kept_error(DeviceIndex device) {
  std::string message;
  {
    std::lock_guard<std::mutex> lock(devices().mutex);
    message.swap(devices().errors.at(device));
  }
  TORCH_CHECK(message.empty(), message);
}

}  // namespace sim
