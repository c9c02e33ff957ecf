// CUDA's runtime and driver without a GPU: torch for CUDA runs on them, with its own allocator, streams, events and graphs.
//
// Device memory is the host's. Each stream is a thread, so that work happens later than its hand-over and beside that of other
// streams; only events order two streams. With STAND_IN_SEED each piece of work may begin late, by chance, so that code which
// lacks a dependency gives wrong answers sooner or later. Captured work becomes nodes of a graph, which run in any order that
// their dependencies leave. What a capture forbids spoils it. A kernel that is not in kernels.cpp fails to launch.
//
// STAND_IN_IDLE=1: kernels that are not elementwise, cuBLAS and large copies do nothing, and succeed; answers mean nothing then
// STAND_IN_SEED, STAND_IN_DELAY_US: the order of late beginnings; how late at most (200)
// STAND_IN_MIB: memory of the card (4096)
// STAND_IN_FAIL=call:number:error[:sticky]: the call of that number fails with this error, and if sticky all later ones
// STAND_IN_REPORT=folder: at its end each process writes there how often it made each call
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "kernels.h"

namespace {

// --- what there is ---------------------------------------------------------------------------------

struct Stream;
struct Event;
struct Graph;

// One recording of an event.
struct Mark {
  bool is_done = false;
  long long time_ns = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Copy {
  char* to = nullptr;
  const char* from = nullptr;
  size_t bytes = 0;
  void run() const;
};

struct Node {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  Work work;                     // of kernels, memsets and host functions
  Copy copy;                     // of copies
  Event* event = nullptr;        // of records and waits
  std::shared_ptr<Graph> child;  // of child graphs
  bool is_enabled = true;
  std::vector<size_t> needs = {};  // nodes that come before, by their numbers
  size_t number = 0;
};

struct Graph {
  std::deque<Node> nodes;  // a node's address is its handle, and stays
  Node* add(Node node, std::vector<size_t> needs) {
    node.needs = std::move(needs);
    node.number = nodes.size();
    nodes.push_back(std::move(node));
    return &nodes.back();
  }
};

// A graph ready to launch. Its nodes are changed by the handles of the graph that it was made of.
struct Executable {
  std::shared_ptr<Graph> graph;
  std::unordered_map<const Node*, size_t> numbers;
  MarkPtr last;  // the end of the launch before, because launches of one executable do not overlap
};

struct Capture {
  unsigned long long id;
  Stream* origin;
  pthread_t thread;
  cudaStreamCaptureMode mode;
  bool is_spoilt = false;
  Graph* graph = new Graph;
};

struct Event {
  unsigned flags;
  MarkPtr mark;                             // the last recording; none: it counts as done
  std::shared_ptr<Capture> capture;         // where it was recorded, if in a capture
  std::vector<size_t> captured_behind = {};  // nodes that it stands behind there
};

struct Stream {
  int priority = 0;
  std::deque<Work> queue;
  bool is_working = false, has_thread = false, is_destroyed = false;
  std::condition_variable wake;
  std::mt19937 random;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> tail;  // the nodes that the next captured one comes behind
};

struct Fault {
  long in_calls;  // the call of this number from now on fails
  cudaError_t error;
  bool is_sticky;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;  // a mark is done, or a stream is idle
  std::map<const char*, size_t> device, locked;  // stretches of memory by their begin
  size_t used_bytes = 0, all_bytes = 0;
  std::map<const void*, std::string> kernels;
  std::map<std::string, long> counts;
  std::map<std::string, Fault> faults;
  std::vector<Stream*> streams;
  std::set<std::shared_ptr<Capture>> captures;
  unsigned long long last_capture_id = 0;
  cudaError_t sticky = cudaSuccess;
  Stream* legacy;
  long seed = -1, delay_us = 200;
  bool is_idle = false;
};

// Never destroyed: threads of streams use it until the process is gone.
State& state();

using Lock = std::unique_lock<std::mutex>;

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local int current_device = 0;

long number_from(const char* variable, long otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atol(text) : otherwise;
}

Stream* new_stream(State& s, int priority) {
  auto* stream = new Stream;
  stream->priority = priority;
  stream->random.seed(static_cast<unsigned>(s.seed * 1009 + static_cast<long>(s.streams.size())));
  s.streams.push_back(stream);
  return stream;
}

State* make_state() {
  auto* s = new State;
  s->all_bytes = static_cast<size_t>(number_from("STAND_IN_MIB", 4096)) << 20;
  s->seed = number_from("STAND_IN_SEED", -1);
  s->delay_us = number_from("STAND_IN_DELAY_US", 200);
  s->is_idle = std::getenv("STAND_IN_IDLE") != nullptr;
  s->legacy = new_stream(*s, 0);
  if (const char* text = std::getenv("STAND_IN_FAIL")) {
    char call[100], sticky[8] = "";
    long number;
    int error;
    if (std::sscanf(text, "%99[^:]:%ld:%d:%7s", call, &number, &error, sticky) >= 3)
      s->faults[call] = {number, static_cast<cudaError_t>(error), *sticky != 0};
  }
  return s;
}

State& state() {
  static State* s = make_state();
  return *s;
}

long long now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void count(const std::string& what) {
  Lock lock(state().mutex);
  state().counts[what]++;
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// What every call begins with: it is counted, and fails if it is its turn to, or if the device is lost.
cudaError_t enter(const char* call) {
  State& s = state();
  Lock lock(s.mutex);
  s.counts[call]++;
  if (s.sticky != cudaSuccess) return fail(s.sticky);
  auto fault = s.faults.find(call);
  if (fault == s.faults.end() || --fault->second.in_calls > 0) return cudaSuccess;
  const auto [_, error, is_sticky] = fault->second;
  s.faults.erase(fault);
  s.counts["faults"]++;
  if (is_sticky) s.sticky = error;
  return fail(error);
}
#define ENTER(call) \
  if (const cudaError_t refused = enter(#call)) return refused
#define ENTER_DRIVER(call) \
  if (const cudaError_t refused = enter(#call)) return static_cast<CUresult>(refused)

Stream* stream_of(cudaStream_t handle) {
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? state().legacy : reinterpret_cast<Stream*>(handle);
}

// --- streams ---------------------------------------------------------------------------------------

void dawdle(std::mt19937& random) {
  State& s = state();
  if (s.seed < 0 || random() % 3) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random() % (s.delay_us + 1)));
}

void serve(Stream* stream) {
  State& s = state();
  Lock lock(s.mutex);
  while (true) {
    stream->wake.wait(lock, [&] { return !stream->queue.empty() || stream->is_destroyed; });
    if (stream->queue.empty()) return;
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->is_working = true;
    lock.unlock();
    dawdle(stream->random);
    work();
    work = {};
    lock.lock();
    stream->is_working = false;
    if (stream->queue.empty()) s.changed.notify_all();
  }
}

void enqueue(Lock&, Stream* stream, Work work) {
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(serve, stream).detach();
  }
  stream->queue.push_back(std::move(work));
  stream->wake.notify_one();
}

bool is_idle(const Stream* stream) { return stream->queue.empty() && !stream->is_working; }

void wait_for_all(Lock& lock) {
  State& s = state();
  s.changed.wait(lock, [&] { return std::all_of(s.streams.begin(), s.streams.end(), is_idle); });
}

Work finish(MarkPtr mark) {
  return [mark] {
    Lock lock(state().mutex);
    mark->time_ns = now_ns();
    mark->is_done = true;
    state().changed.notify_all();
  };
}

Work await(MarkPtr mark) {
  return [mark] {
    Lock lock(state().mutex);
    state().changed.wait(lock, [&] { return mark->is_done; });
  };
}

// Work that a lost device no longer does.
Work unless_lost(Work work) {
  return [work] {
    {
      Lock lock(state().mutex);
      if (state().sticky != cudaSuccess) return;
    }
    work();
  };
}

// --- captures --------------------------------------------------------------------------------------

cudaError_t spoil(Capture& capture, cudaError_t error, const std::string& why) {
  capture.is_spoilt = true;
  state().counts["captures spoilt by " + why]++;
  return fail(error);
}

// Refuses a call that the captures under way do not allow on this thread.
cudaError_t check_allowed(Lock&, const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const auto& capture : state().captures) {
    const bool is_mine = pthread_equal(capture->thread, pthread_self());
    const bool for_all = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (for_all || (is_mine && capture->mode != cudaStreamCaptureModeRelaxed))
      return spoil(*capture, cudaErrorStreamCaptureUnsupported, call);
  }
  return cudaSuccess;
}
#define ENTER_OUTSIDE(call) \
  ENTER(call);              \
  Lock lock(state().mutex); \
  if (const cudaError_t refused = check_allowed(lock, #call)) return refused

// Hands work to a stream, or to the graph that captures it.
cudaError_t submit(Lock& lock, Stream* stream, Node node) {
  if (const auto& capture = stream->capture) {
    if (capture->is_spoilt) return fail(cudaErrorStreamCaptureInvalidated);
    stream->tail = {capture->graph->add(std::move(node), stream->tail)->number};
    return cudaSuccess;
  }
  enqueue(lock, stream, unless_lost(node.type == CU_GRAPH_NODE_TYPE_MEMCPY ? [copy = node.copy] { copy.run(); } : node.work));
  return cudaSuccess;
}

Node node_of(CUgraphNodeType type, Work work) {
  Node node;
  node.type = type;
  node.work = std::move(work);
  return node;
}

// --- graphs ----------------------------------------------------------------------------------------

// What a launch does, with the marks of its events as the host sees them from now on.
Work launch_of(std::shared_ptr<Graph> graph) {
  auto marks = std::make_shared<std::unordered_map<size_t, MarkPtr>>();
  auto children = std::make_shared<std::unordered_map<size_t, Work>>();
  for (const Node& node : graph->nodes) {
    if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) (*marks)[node.number] = node.event->mark;
    if (node.child) (*children)[node.number] = launch_of(node.child);
  }
  for (const Node& node : graph->nodes)
    if (node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
      (*marks)[node.number] = node.event->mark = std::make_shared<Mark>();
      node.event->capture = nullptr;
    }
  const long launch = state().counts["graph launches"]++;
  return [=] {
    std::mt19937 random(static_cast<unsigned>(state().seed * 7919 + launch));
    std::vector<size_t> num_needed(graph->nodes.size()), ready;
    std::vector<std::vector<size_t>> dependents(graph->nodes.size());
    for (const Node& node : graph->nodes) {
      num_needed[node.number] = node.needs.size();
      for (size_t need : node.needs) dependents[need].push_back(node.number);
      if (node.needs.empty()) ready.push_back(node.number);
    }
    while (!ready.empty()) {
      const size_t chosen = state().seed < 0 ? 0 : random() % ready.size();
      const Node& node = graph->nodes[ready[chosen]];
      ready.erase(ready.begin() + static_cast<long>(chosen));
      for (size_t next : dependents[node.number])
        if (!--num_needed[next]) ready.push_back(next);
      dawdle(random);
      if (node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD)
        finish(marks->at(node.number))();
      else if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
        if (const MarkPtr mark = marks->at(node.number)) await(mark)();
      } else if (node.child)
        children->at(node.number)();
      else if (node.is_enabled)
        unless_lost(node.type == CU_GRAPH_NODE_TYPE_MEMCPY ? [copy = node.copy] { copy.run(); } : node.work)();
    }
  };
}

// The node of an executable that a handle means, ready to be changed: launches under way keep what they began with.
Node* to_change(CUgraphExec handle, CUgraphNode node, CUgraphNodeType type) {
  auto& executable = *reinterpret_cast<Executable*>(handle);
  const auto at = executable.numbers.find(reinterpret_cast<Node*>(node));
  if (at == executable.numbers.end()) return nullptr;
  if (executable.graph.use_count() > 1) executable.graph = std::make_shared<Graph>(*executable.graph);
  Node& found = executable.graph->nodes[at->second];
  return found.type == type || type == CU_GRAPH_NODE_TYPE_EMPTY ? &found : nullptr;
}

// --- memory ----------------------------------------------------------------------------------------

bool lies_in(const std::map<const char*, size_t>& stretches, const void* begin, size_t bytes) {
  const auto* address = static_cast<const char*>(begin);
  auto after = stretches.upper_bound(address);
  if (after == stretches.begin()) return false;
  const auto& [start, size] = *--after;
  return address + bytes <= start + size;
}

enum class Place { device, locked, pageable };

Place place_of(const void* begin, size_t bytes) {
  if (lies_in(state().device, begin, bytes)) return Place::device;
  return lies_in(state().locked, begin, bytes) ? Place::locked : Place::pageable;
}

cudaError_t copy_rows(void* to, size_t to_step, const void* from, size_t from_step, size_t bytes, size_t rows, cudaStream_t handle) {
  static const char* const names[] = {"device", "locked", "pageable"};
  State& s = state();
  Lock lock(s.mutex);
  Stream* stream = stream_of(handle);
  if (!bytes || !rows) return cudaSuccess;
  const Place source = place_of(from, (rows - 1) * from_step + bytes), target = place_of(to, (rows - 1) * to_step + bytes);
  s.counts[std::string("copies ") + names[int(source)] + " to " + names[int(target)]]++;
  const bool is_pageable = source == Place::pageable || target == Place::pageable;
  if (is_pageable && stream->capture) return spoil(*stream->capture, cudaErrorStreamCaptureUnsupported, "pageable memory");
  if (rows == 1) {
    Node node;
    node.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    node.copy = {static_cast<char*>(to), static_cast<const char*>(from), bytes};
    if (const cudaError_t refused = submit(lock, stream, std::move(node))) return refused;
  } else {
    auto work = [=] {
      for (size_t row = 0; row < rows; row++)
        std::memcpy(static_cast<char*>(to) + row * to_step, static_cast<const char*>(from) + row * from_step, bytes);
    };
    // Not updatable here, so it need not look like a copy.
    if (const cudaError_t refused = submit(lock, stream, node_of(CU_GRAPH_NODE_TYPE_KERNEL, work))) return refused;
  }
  // CUDA takes what lies in pageable memory aside before it returns.
  if (is_pageable) s.changed.wait(lock, [&] { return is_idle(stream); });
  return s.sticky == cudaSuccess ? cudaSuccess : fail(s.sticky);
}

void Copy::run() const {
  if (!state().is_idle || bytes < 1 << 20) std::memcpy(to, from, bytes);
}

void write_report() {
  const char* folder = std::getenv("STAND_IN_REPORT");
  if (!folder) return;
  const std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".txt";
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) return;
  Lock lock(state().mutex);
  for (const auto& [what, number] : state().counts) std::fprintf(file, "%ld %s\n", number, what.c_str());
  std::fclose(file);
}

struct AtExit {
  ~AtExit() { write_report(); }
} at_exit;

cudaError_t launch_kernel(const void* function, void** arguments, cudaStream_t handle) {
  State& s = state();
  Lock lock(s.mutex);
  const auto known = s.kernels.find(function);
  const std::string name = known == s.kernels.end() ? "?" : known->second;
  Work work = work_of_kernel(name, arguments);
  s.counts[(work ? "kernel " : "unknown kernel ") + name]++;
  if (s.is_idle && (!work || name.find("elementwise") == std::string::npos))
    work = [] {};
  else if (!work)
    return fail(cudaErrorNoKernelImageForDevice);
  return submit(lock, stream_of(handle), node_of(CU_GRAPH_NODE_TYPE_KERNEL, std::move(work)));
}

}  // namespace

extern "C" {

// --- for tests -------------------------------------------------------------------------------------

// Has the `number`-th call of a name fail from now on; no call with a number of 0.
void standInFail(const char* call, long number, int error, int is_sticky) {
  Lock lock(state().mutex);
  state().faults.erase(call);
  if (number) state().faults[call] = {number, static_cast<cudaError_t>(error), is_sticky != 0};
}

// Has streams begin their work late by chance from now on, by a few microseconds at most; at once with a negative seed.
void standInDawdle(long seed, long delay_us) {
  State& s = state();
  Lock lock(s.mutex);
  s.seed = seed;
  s.delay_us = delay_us;
  for (size_t number = 0; number < s.streams.size(); number++)
    s.streams[number]->random.seed(static_cast<unsigned>(seed * 1009 + static_cast<long>(number)));
}

// Writes how often everything was done, a line each; returns the bytes that this takes.
size_t standInCounts(char* text, size_t bytes) {
  Lock lock(state().mutex);
  std::string all;
  for (const auto& [what, number] : state().counts) all += std::to_string(number) + " " + what + "\n";
  if (bytes) std::snprintf(text, bytes, "%s", all.c_str());
  return all.size() + 1;
}

// --- errors and devices ----------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  const cudaError_t error = state().sticky != cudaSuccess ? state().sticky : last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return state().sticky != cudaSuccess ? state().sticky : last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char name[32];
  std::snprintf(name, sizeof name, "cudaError%d", error);
  return name;
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return "an error of the stand-in";
  }
}
cudaError_t cudaDriverGetVersion(int* version) {
  ENTER(cudaDriverGetVersion);
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  ENTER(cudaRuntimeGetVersion);
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  ENTER(cudaGetDeviceCount);
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  ENTER(cudaGetDevice);
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  ENTER(cudaSetDevice);
  if (device) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  ENTER(cudaGetDeviceProperties);
  *properties = {};
  auto& p = *properties;
  std::strcpy(p.name, "stand-in");
  for (int i = 0; i < 16; i++) p.uuid.bytes[i] = static_cast<char>(i + 1);
  p.totalGlobalMem = state().all_bytes;
  p.major = 9;  // like an H100
  p.warpSize = 32;
  p.multiProcessorCount = 132;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = 227 << 10;
  p.sharedMemPerMultiprocessor = 228 << 10;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.l2CacheSize = 50 << 20;
  p.textureAlignment = 512;
  p.unifiedAddressing = p.managedMemory = p.concurrentKernels = 1;
  p.asyncEngineCount = 3;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  ENTER(cudaDeviceGetAttribute);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:00:1e.0");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(cudaDeviceGetStreamPriorityRange);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ENTER_OUTSIDE(cudaDeviceSynchronize);
  wait_for_all(lock);
  return state().sticky == cudaSuccess ? cudaSuccess : fail(state().sticky);
}

// --- memory ----------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  ENTER_OUTSIDE(cudaMalloc);
  State& s = state();
  if (s.used_bytes + bytes > s.all_bytes) return fail(cudaErrorMemoryAllocation);
  *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  s.device[static_cast<char*>(*memory)] = bytes;
  s.used_bytes += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  ENTER_OUTSIDE(cudaFree);
  if (!memory) return cudaSuccess;
  State& s = state();
  const auto at = s.device.find(static_cast<char*>(memory));
  if (at == s.device.end()) return fail(cudaErrorInvalidValue);
  wait_for_all(lock);
  munmap(memory, at->second);
  s.used_bytes -= at->second;
  s.device.erase(at);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER(cudaMemGetInfo);
  Lock lock(state().mutex);
  *total = state().all_bytes;
  *free = state().all_bytes - state().used_bytes;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  ENTER_OUTSIDE(cudaHostAlloc);
  if (posix_memalign(memory, 4096, std::max<size_t>(bytes, 1))) return fail(cudaErrorMemoryAllocation);
  state().locked[static_cast<char*>(*memory)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  ENTER_OUTSIDE(cudaFreeHost);
  if (!state().locked.erase(static_cast<char*>(memory))) return fail(cudaErrorInvalidValue);
  wait_for_all(lock);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  ENTER_OUTSIDE(cudaHostRegister);
  if (!bytes || reinterpret_cast<size_t>(memory) % 4096) return fail(cudaErrorInvalidValue);
  state().locked[static_cast<char*>(memory)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  ENTER_OUTSIDE(cudaHostUnregister);
  return state().locked.erase(static_cast<char*>(memory)) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  ENTER(cudaPointerGetAttributes);
  Lock lock(state().mutex);
  const Place place = place_of(memory, 1);
  *attributes = {};
  attributes->type = place == Place::device   ? cudaMemoryTypeDevice
                     : place == Place::locked ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(cudaMemcpyAsync);
  return copy_rows(to, bytes, from, bytes, bytes, 1, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  ENTER(cudaMemcpyPeerAsync);
  return copy_rows(to, bytes, from, bytes, bytes, 1, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_step, const void* from, size_t from_step, size_t bytes, size_t rows,
                              cudaMemcpyKind, cudaStream_t stream) {
  ENTER(cudaMemcpy2DAsync);
  return copy_rows(to, to_step, from, from_step, bytes, rows, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  {
    ENTER_OUTSIDE(cudaMemcpy);
  }
  if (const cudaError_t refused = copy_rows(to, bytes, from, bytes, bytes, 1, nullptr)) return refused;
  Lock lock(state().mutex);
  state().changed.wait(lock, [] { return is_idle(state().legacy); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  ENTER(cudaMemsetAsync);
  Lock lock(state().mutex);
  return submit(lock, stream_of(stream), node_of(CU_GRAPH_NODE_TYPE_MEMSET, [=] { std::memset(memory, value, bytes); }));
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) { return cudaMemsetAsync(memory, value, bytes, nullptr); }

// --- streams and events ----------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  ENTER_OUTSIDE(cudaStreamCreateWithPriority);
  *stream = reinterpret_cast<cudaStream_t>(new_stream(state(), priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER(cudaStreamDestroy);
  Lock lock(state().mutex);
  stream_of(stream)->is_destroyed = true;  // its memory stays, which a test can afford
  stream_of(stream)->wake.notify_one();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  ENTER(cudaStreamGetPriority);
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER_OUTSIDE(cudaStreamQuery);
  Stream* stream = stream_of(handle);
  if (stream->capture) return spoil(*stream->capture, cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  return is_idle(stream) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER(cudaStreamSynchronize);
  State& s = state();
  Lock lock(s.mutex);
  Stream* stream = stream_of(handle);
  if (stream->capture) return spoil(*stream->capture, cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  s.changed.wait(lock, [&] { return is_idle(stream); });
  return s.sticky == cudaSuccess ? cudaSuccess : fail(s.sticky);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER(cudaLaunchHostFunc);
  Lock lock(state().mutex);
  return submit(lock, stream_of(stream), node_of(CU_GRAPH_NODE_TYPE_HOST, [=] { function(data); }));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  ENTER(cudaStreamAddCallback);
  Lock lock(state().mutex);
  return submit(lock, stream_of(stream), node_of(CU_GRAPH_NODE_TYPE_HOST, [=] { function(stream, cudaSuccess, data); }));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER(cudaEventCreateWithFlags);
  *event = reinterpret_cast<cudaEvent_t>(new Event{flags, nullptr, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER(cudaEventDestroy);
  Lock lock(state().mutex);
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  ENTER(cudaEventRecordWithFlags);
  Lock lock(state().mutex);
  auto* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  if (!stream->capture) {
    event->capture = nullptr;
    event->mark = std::make_shared<Mark>();
    enqueue(lock, stream, finish(event->mark));
    return cudaSuccess;
  }
  if (flags & cudaEventRecordExternal) {
    Node node;
    node.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    node.event = event;
    return submit(lock, stream, std::move(node));
  }
  event->capture = stream->capture;
  event->captured_behind = stream->tail;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER(cudaEventRecord);
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  ENTER(cudaStreamWaitEvent);
  Lock lock(state().mutex);
  auto* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  if (stream->capture && flags & cudaEventWaitExternal) {
    Node node;
    node.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
    node.event = event;
    return submit(lock, stream, std::move(node));
  }
  if (stream->capture && event->capture != stream->capture)
    return spoil(*stream->capture, cudaErrorStreamCaptureIsolation, "waiting for work that is not captured");
  if (event->capture) {
    stream->capture = event->capture;  // another stream joins the capture
    stream->tail.insert(stream->tail.end(), event->captured_behind.begin(), event->captured_behind.end());
  } else if (event->mark) {
    enqueue(lock, stream, await(event->mark));
  }
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  ENTER_OUTSIDE(cudaEventQuery);
  auto* event = reinterpret_cast<Event*>(handle);
  if (event->capture) return fail(cudaErrorCapturedEvent);
  return !event->mark || event->mark->is_done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ENTER_OUTSIDE(cudaEventSynchronize);
  State& s = state();
  auto* event = reinterpret_cast<Event*>(handle);
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (const MarkPtr mark = event->mark) s.changed.wait(lock, [&] { return mark->is_done; });
  return s.sticky == cudaSuccess ? cudaSuccess : fail(s.sticky);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  ENTER(cudaEventElapsedTime);
  Lock lock(state().mutex);
  const auto *from = reinterpret_cast<Event*>(begin), *to = reinterpret_cast<Event*>(end);
  for (const Event* event : {from, to}) {
    if (!event->mark || event->flags & cudaEventDisableTiming) return fail(cudaErrorInvalidResourceHandle);
    if (!event->mark->is_done) return cudaErrorNotReady;
  }
  *ms = static_cast<float>(to->mark->time_ns - from->mark->time_ns) / 1e6f;
  return cudaSuccess;
}

// --- captures and graphs ---------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER(cudaStreamBeginCapture);
  State& s = state();
  Lock lock(s.mutex);
  Stream* stream = stream_of(handle);
  if (stream == s.legacy || stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_shared<Capture>(Capture{++s.last_capture_id, stream, pthread_self(), mode});
  stream->tail.clear();
  s.captures.insert(stream->capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  State& s = state();
  const cudaError_t refused = enter("cudaStreamEndCapture");
  Lock lock(s.mutex);
  *graph = nullptr;
  const auto capture = stream_of(handle)->capture;
  if (!capture || capture->origin != stream_of(handle)) return fail(cudaErrorIllegalState);
  const std::set<size_t> joined(capture->origin->tail.begin(), capture->origin->tail.end());
  for (Stream* stream : s.streams)
    if (stream->capture == capture) stream->capture = nullptr, stream->tail.clear();
  s.captures.erase(capture);
  if (refused) return refused;
  if (capture->is_spoilt) return fail(cudaErrorStreamCaptureInvalidated);
  std::set<size_t> ends;
  for (const Node& node : capture->graph->nodes) {
    ends.insert(node.number);
    for (size_t need : node.needs) ends.erase(need);
  }
  if (!std::includes(joined.begin(), joined.end(), ends.begin(), ends.end())) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ENTER(cudaStreamIsCapturing);
  Lock lock(state().mutex);
  const auto& capture = stream_of(handle)->capture;
  *status = !capture               ? cudaStreamCaptureStatusNone
            : capture->is_spoilt ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* num_nodes) {
  ENTER(cudaStreamGetCaptureInfo);
  Stream* stream = stream_of(handle);
  cudaStreamIsCapturing(handle, status);
  Lock lock(state().mutex);
  const auto& capture = stream->capture;
  static thread_local std::vector<cudaGraphNode_t> tail;
  static thread_local std::vector<cudaGraphEdgeData> plain;
  tail.clear();
  if (capture)
    for (size_t number : stream->tail) tail.push_back(reinterpret_cast<cudaGraphNode_t>(&capture->graph->nodes[number]));
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph) : nullptr;
  if (nodes) *nodes = tail.data();
  plain.resize(tail.size());
  if (edges) *edges = plain.data();
  if (num_nodes) *num_nodes = tail.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
  ENTER(cudaGraphInstantiateWithFlags);
  const auto* graph = reinterpret_cast<Graph*>(handle);
  auto* made = new Executable{std::make_shared<Graph>(*graph), {}, nullptr};
  for (const Node& node : graph->nodes) made->numbers[&node] = node.number;
  *executable = reinterpret_cast<cudaGraphExec_t>(made);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  ENTER(cudaGraphLaunch);
  Lock lock(state().mutex);
  auto* executable = reinterpret_cast<Executable*>(handle);
  Stream* stream = stream_of(stream_handle);
  if (stream->capture) {
    Node node;
    node.type = CU_GRAPH_NODE_TYPE_GRAPH;
    node.child = executable->graph;
    return submit(lock, stream, std::move(node));
  }
  if (executable->last) enqueue(lock, stream, await(executable->last));
  executable->last = std::make_shared<Mark>();
  enqueue(lock, stream, launch_of(executable->graph));
  enqueue(lock, stream, finish(executable->last));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER(cudaGraphDestroy);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  ENTER(cudaGraphExecDestroy);
  Lock lock(state().mutex);
  delete reinterpret_cast<Executable*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* num_nodes) {
  ENTER(cudaGraphGetNodes);
  auto& all = reinterpret_cast<Graph*>(handle)->nodes;
  if (nodes)
    for (size_t i = 0; i < *num_nodes; i++) nodes[i] = i < all.size() ? reinterpret_cast<cudaGraphNode_t>(&all[i]) : nullptr;
  *num_nodes = all.size();
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*) {
  return fail(cudaErrorNotSupported);
}

// --- kernels ---------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Lock lock(state().mutex);
  state().kernels[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct LaunchSetting {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
static thread_local std::vector<LaunchSetting> settings;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  settings.push_back({grid, block, shared_bytes, static_cast<cudaStream_t>(stream)});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  const LaunchSetting last = settings.back();
  settings.pop_back();
  *grid = last.grid, *block = last.block, *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  ENTER(cudaLaunchKernel);
  return launch_kernel(function, arguments, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  ENTER(cudaLaunchKernel);
  return launch_kernel(kernel, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* setting, const void* function, void** arguments) {
  ENTER(cudaLaunchKernel);
  return launch_kernel(function, arguments, setting->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ENTER(cudaFuncGetAttributes);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  ENTER(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared_bytes, 0);
}

// --- the driver ------------------------------------------------------------------------------------

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(&state());
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, 0); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  // This library answers to both names, so it knows all that there is.
  static void* self = dlopen("libcuda.so.1", RTLD_LAZY);
  *function = dlsym(self, (std::string(name) + "_v3").c_str());
  if (!*function) *function = dlsym(self, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(self, name);
  if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const CUresult result = cuGetProcAddress(name, function, 0, 0, nullptr);
  if (found) *found = result == CUDA_SUCCESS ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorSymbolNotFound;
}
CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                const CUgraphNode** nodes, const CUgraphEdgeData** edges, size_t* num_nodes) {
  unsigned long long number;
  auto* kind = reinterpret_cast<cudaStreamCaptureStatus*>(status);
  auto* kinds = reinterpret_cast<const cudaGraphEdgeData**>(edges);
  const auto result = cudaStreamGetCaptureInfo(stream, kind, &number, graph, nodes, kinds, num_nodes);
  if (id) *id = number;
  return static_cast<CUresult>(result);
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* num_nodes) {
  ENTER_DRIVER(cuGraphGetNodes);
  return static_cast<CUresult>(cudaGraphGetNodes(graph, nodes, num_nodes));
}
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  ENTER_DRIVER(cuGraphNodeGetType);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  *type = reinterpret_cast<Node*>(node)->type;
  return CUDA_SUCCESS;
}
static CUDA_MEMCPY3D described(const Copy& copy) {
  CUDA_MEMCPY3D text = {};
  const auto describe = [&](const char* memory, CUmemorytype& type, CUdeviceptr& device, auto& host) {
    const bool is_device = place_of(memory, copy.bytes) == Place::device;
    type = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    if (is_device)
      device = reinterpret_cast<CUdeviceptr>(memory);
    else
      host = const_cast<char*>(memory);
  };
  describe(copy.from, text.srcMemoryType, text.srcDevice, text.srcHost);
  describe(copy.to, text.dstMemoryType, text.dstDevice, text.dstHost);
  text.WidthInBytes = copy.bytes;
  text.Height = text.Depth = 1;
  return text;
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* parameters) {
  ENTER_DRIVER(cuGraphMemcpyNodeGetParams);
  Lock lock(state().mutex);
  const auto* node = reinterpret_cast<Node*>(handle);
  if (node->type != CU_GRAPH_NODE_TYPE_MEMCPY) return CUDA_ERROR_INVALID_VALUE;
  *parameters = described(node->copy);
  return CUDA_SUCCESS;
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec executable, CUgraphNode handle, const CUDA_MEMCPY3D* parameters, CUcontext) {
  ENTER_DRIVER(cuGraphExecMemcpyNodeSetParams);
  Lock lock(state().mutex);
  Node* node = to_change(executable, handle, CU_GRAPH_NODE_TYPE_MEMCPY);
  const CUDA_MEMCPY3D& p = *parameters;
  if (!node || p.Height != 1 || p.Depth != 1 || !p.WidthInBytes) return CUDA_ERROR_INVALID_VALUE;
  const auto address = [](CUmemorytype type, CUdeviceptr device, const void* host, size_t offset) {
    return (type == CU_MEMORYTYPE_HOST ? static_cast<const char*>(host) : reinterpret_cast<const char*>(device)) + offset;
  };
  const Copy copy = {const_cast<char*>(address(p.dstMemoryType, p.dstDevice, p.dstHost, p.dstXInBytes)),
                     address(p.srcMemoryType, p.srcDevice, p.srcHost, p.srcXInBytes), p.WidthInBytes};
  // The kinds of memory must stay.
  if (place_of(copy.to, copy.bytes) != place_of(node->copy.to, 1) || place_of(copy.from, copy.bytes) != place_of(node->copy.from, 1))
    return CUDA_ERROR_INVALID_VALUE;
  node->copy = copy;
  return CUDA_SUCCESS;
}
CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec executable, CUgraphNode handle, CUevent event) {
  ENTER_DRIVER(cuGraphExecEventRecordNodeSetEvent);
  Lock lock(state().mutex);
  Node* node = to_change(executable, handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  node->event = reinterpret_cast<Event*>(event);
  return CUDA_SUCCESS;
}
CUresult cuGraphNodeSetEnabled(CUgraphExec executable, CUgraphNode handle, unsigned is_enabled) {
  ENTER_DRIVER(cuGraphNodeSetEnabled);
  Lock lock(state().mutex);
  Node* node = to_change(executable, handle, CU_GRAPH_NODE_TYPE_EMPTY);
  const bool can_be = node && (node->type == CU_GRAPH_NODE_TYPE_KERNEL || node->type == CU_GRAPH_NODE_TYPE_MEMSET ||
                               node->type == CU_GRAPH_NODE_TYPE_MEMCPY);
  if (!can_be) return CUDA_ERROR_INVALID_VALUE;
  node->is_enabled = is_enabled;
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) { return static_cast<CUresult>(cudaGraphLaunch(executable, stream)); }
}
