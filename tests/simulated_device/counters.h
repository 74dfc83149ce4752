// Counts of waits, copies and launches, by a key whose fields are separated by tabs.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace sim {

std::map<std::string, int64_t> counted();
void reset_counters();

// Called with the kind and the operator of every wait of the host, on its thread; or null.
using Watcher = void (*)(const char* kind, const char* name);
void set_watcher(Watcher watcher);

}  // namespace sim
