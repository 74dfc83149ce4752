// The device as PyTorch's runtime sees it: current device, streams and events, generator, hooks.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <vector>

namespace sim {

int64_t setting(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::atoll(text);
}

namespace {

thread_local DeviceIndex the_current_device = 0;

// An event: the last mark that was recorded.
struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
  DeviceIndex device = 0;

  std::shared_ptr<Mark> last() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return as_device(exchange_device(device.index()));
  }
  c10::Device getDevice() const override {
    return as_device(current_device());
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      the_current_device = device.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, as_device(index(device)), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return pool_stream(index(device), high);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(index(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_queue(queue_of(stream), "stream", "");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    wait_for_device(device < 0 ? current_device() : device, "device", "");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(
      void** event, const c10::Stream& stream, const DeviceIndex device,
      const c10::EventFlag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "event of sim:", int(device),
        " cannot be recorded in ", stream);
    if (*event == nullptr) {
      *event = new Event;
    }
    auto mark = queue_of(stream).mark();
    auto* made = static_cast<Event*>(*event);
    std::lock_guard<std::mutex> lock(made->mutex);
    made->mark = std::move(mark);
    made->device = stream.device_index();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto mark = last(event)) {
      queue_of(stream).wait_for(mark);
    }
  }
  bool queryEvent(void* event) const override {
    auto mark = last(event);
    return mark == nullptr || mark->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (auto mark = last(event)) {
      wait_for_mark(*mark, static_cast<Event*>(event)->device, "event");
    }
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto a = last(first), b = last(second);
    TORCH_CHECK(
        a && b && a->is_set() && b->is_set(), "both events must be recorded and completed");
    return std::chrono::duration<double, std::milli>(b->when() - a->when()).count();
  }

 private:
  static DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static std::shared_ptr<Mark> last(void* event) {
    return event == nullptr ? nullptr : static_cast<Event*>(event)->last();
  }
};

// A seed and how many numbers were drawn; numbers are hashes of both (splitmix64).
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl(
            as_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    drawn_ = 0;
  }
  void set_offset(uint64_t offset) override {
    drawn_ = offset;
  }
  uint64_t get_offset() const override {
    return drawn_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 2 * sizeof(uint64_t) && state.is_cpu(),
        "state of a sim generator: 16 bytes on the CPU expected, not ", state.numel());
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof(seed_));
    std::memcpy(&drawn_, bytes + sizeof(seed_), sizeof(drawn_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({2 * sizeof(uint64_t)}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof(seed_));
    std::memcpy(bytes + sizeof(seed_), &drawn_, sizeof(drawn_));
    return state.getIntrusivePtr();
  }
  uint64_t draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t x = seed_ * 0xD1342543DE82EF95ULL + ++drawn_ * 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->drawn_ = drawn_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t drawn_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(at::make_generator<Generator>(i));
    }
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(DeviceIndex device) const override {
    exchange_device(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const DeviceIndex device = device_of(data);
    TORCH_CHECK(device >= 0, "sim: ", data, " is no device address");
    return as_device(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

DeviceIndex device_count() {
  static const auto count = static_cast<DeviceIndex>(setting("SIM_DEVICES", 2));
  return count;
}

DeviceIndex current_device() {
  return the_current_device;
}

DeviceIndex exchange_device(DeviceIndex device) {
  const DeviceIndex before = the_current_device;
  if (device >= 0) {
    TORCH_CHECK(
        device < device_count(), "invalid device sim:", int(device), ": there are ",
        int(device_count()));
    the_current_device = device;
  }
  return before;
}

uint64_t draw_seed(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().is_privateuseone(), "expected a generator of sim, not of ",
      generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
}

uint64_t draw_seed(DeviceIndex device) {
  return draw_seed(default_generator(device));
}

at::Generator generator_of(DeviceIndex device) {
  return default_generator(device);
}

}  // namespace sim
