// What Python calls by torch.ops.sim.
#include "counters.h"
#include "tensors.h"

#include <torch/library.h>

namespace sim {
namespace {

Queue& queue_at(int64_t device, int64_t stream) {
  return queue_of(c10::Stream(
      c10::Stream::UNSAFE, as_device(static_cast<DeviceIndex>(device)), stream));
}

// A C function, called by a stream with a number, without the GIL.
void enqueue(int64_t device, int64_t stream, int64_t function, int64_t argument) {
  auto* called = reinterpret_cast<void (*)(int64_t)>(function);
  queue_at(device, stream).push("callback", [called, argument] { called(argument); });
}

std::string pointer_kind(int64_t address) {
  const auto* pointer = reinterpret_cast<const void*>(address);
  const DeviceIndex device = device_of(pointer);
  if (device >= 0) {
    return "device " + std::to_string(device);
  }
  return is_pinned(pointer) ? "pinned host" : "other";
}

int64_t host_address(int64_t address) {
  return reinterpret_cast<int64_t>(host(reinterpret_cast<const void*>(address)));
}

c10::Dict<std::string, int64_t> counters() {
  c10::Dict<std::string, int64_t> copy;
  for (const auto& [key, value] : counted()) {
    copy.insert(key, value);
  }
  return copy;
}

void set_wait_watcher(int64_t function) {
  set_watcher(reinterpret_cast<Watcher>(function));
}

at::Generator generator(int64_t device) {
  return generator_of(static_cast<DeviceIndex>(device));
}

at::Tensor get_rng_state(int64_t device) {
  return at::Tensor(generator(device).unsafeGetGeneratorImpl()->get_state());
}

void set_rng_state(const at::Tensor& state, int64_t device) {
  generator(device).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

void manual_seed(int64_t seed, int64_t device) {
  generator(device).set_current_seed(static_cast<uint64_t>(seed));
}

int64_t initial_seed(int64_t device) {
  return static_cast<int64_t>(generator(device).current_seed());
}

int64_t count_devices() {
  return device_count();
}

void fail(int64_t device, std::string message) {
  keep_error(static_cast<DeviceIndex>(device), message);
}

TORCH_LIBRARY(sim, m) {
  m.def("host_view(Tensor tensor) -> Tensor", &host_view);
  m.def("enqueue", &enqueue);
  m.def("device_count", &count_devices);
  m.def("fail", &fail);
  m.def("pointer_kind", &pointer_kind);
  m.def("host_address", &host_address);
  m.def("set_delay", &set_delay);
  m.def("counters", &counters);
  m.def("reset_counters", &reset_counters);
  m.def("set_wait_watcher", &set_wait_watcher);
  m.def("synchronous_operators", &synchronous_operators);
  m.def("get_rng_state", &get_rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("manual_seed", &manual_seed);
  m.def("initial_seed", &initial_seed);
  m.def("end_streams", &end_streams);
}

}  // namespace
}  // namespace sim
