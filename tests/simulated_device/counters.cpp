// Counts of waits, copies and launches.
#include "counters.h"

#include "sim.h"

#include <atomic>

namespace sim {
namespace {

struct Counters {
  std::mutex mutex;
  std::map<std::string, int64_t> values;
  std::atomic<Watcher> watcher{nullptr};
};

Counters& counters() {
  static auto* one = new Counters;
  return *one;
}

}  // namespace

void count(const std::string& key, int64_t by) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().values[key] += by;
}

void count_wait(const char* kind, const std::string& name) {
  count(std::string("wait\t") + kind + "\t" + name);
  if (Watcher watcher = counters().watcher) {
    watcher(kind, name.c_str());
  }
}

std::map<std::string, int64_t> counted() {
  std::lock_guard<std::mutex> lock(counters().mutex);
  return counters().values;
}

void reset_counters() {
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().values.clear();
}

void set_watcher(Watcher watcher) {
  counters().watcher = watcher;
}

}  // namespace sim
