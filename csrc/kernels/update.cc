#include "kernels/update.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "core/error.h"
#include "kernels/measured_choice.h"
#include "kernels/page_home.h"
#include "kernels/update_check.h"
#include "kernels/update_pass.h"
#include "kernels/work_queues.h"

namespace cxl_offload::kernels {
namespace {

// One thread takes a number of elements between these two at a time. That is enough for the
// prefetchers to follow the streams, and so few that a thread which loses its CPU for a while does
// not hold up the others.
constexpr size_t kMostElements = size_t{256} << 10;
constexpr size_t kFewestElements = size_t{16} << 10;
constexpr size_t kChunksPerThread = 16;
// Smaller copies are stored through the caches, where their reader will find them.
constexpr size_t kCachedCopyBytes = size_t{4} << 20;

float to_constant(double value) { return static_cast<float>(value); }

Constants constants_of(const Adam& rule) {
  const auto step = static_cast<double>(rule.step);
  const double first = rule.bias_correction ? 1 - std::pow(rule.beta1, step) : 1;
  const double second = rule.bias_correction ? 1 - std::pow(rule.beta2, step) : 1;
  Constants c;
  c.grad_scale = to_constant(rule.grad_scale);
  c.l2 = to_constant(rule.decoupled ? 0 : rule.weight_decay);
  c.decay = to_constant(rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1);
  c.beta1 = to_constant(rule.beta1);
  c.rest1 = to_constant(1 - rule.beta1);
  c.beta2 = to_constant(rule.beta2);
  c.rest2 = to_constant(1 - rule.beta2);
  c.root_scale = to_constant(1 / std::sqrt(second));
  c.eps = to_constant(rule.eps);
  c.minus_step = to_constant(-rule.lr / first);
  return c;
}

Constants constants_of(const Adagrad& rule) {
  Constants c;
  c.grad_scale = to_constant(rule.grad_scale);
  c.l2 = to_constant(rule.weight_decay);
  c.eps = to_constant(rule.eps);
  const double slowed = 1 + static_cast<double>(rule.step - 1) * rule.lr_decay;
  c.minus_step = to_constant(-rule.lr / slowed);
  return c;
}

Constants constants_of(const Lion& rule) {
  Constants c;
  c.grad_scale = to_constant(rule.grad_scale);
  c.decay = to_constant(1 - rule.lr * rule.weight_decay);
  c.beta1 = to_constant(rule.beta1);
  c.rest1 = to_constant(1 - rule.beta1);
  c.beta2 = to_constant(rule.beta2);
  c.rest2 = to_constant(1 - rule.beta2);
  c.minus_step = to_constant(-rule.lr);
  return c;
}

CopyKind copy_kind(const Update& update) {
  if (!update.copy) return CopyKind::kNone;
  return update.copy->dtype == Dtype::kBfloat16 ? CopyKind::kBf16 : CopyKind::kF16;
}

UpdatePass find_noisy_pass(const PassKey& key, Isa isa) {
  constexpr OfIsa<UpdatePass (*)(const PassKey&)> kEach{
      noisy_pass_scalar, noisy_pass_neon, noisy_pass_sve256, noisy_pass_avx2, noisy_pass_avx512};
  return kEach.at(isa)(key);
}

// How many bytes ahead the widest stream may be fetched; others as many elements. On one machine
// 4096 were 6 % slower than none while memory was fast, and no different an hour later.
constexpr std::array<size_t, 3> kPrefetchBytes = {1024, 0, 4096};
using PrefetchChoice = MeasuredChoice<kPrefetchBytes.size()>;

// The choice that updates share whose streams are as wide. What is computed has no part in it.
PrefetchChoice& prefetch_of(const Update& update) {
  constexpr size_t kWidths = 3;  // 1, 2 and 4 bytes
  static std::array<PrefetchChoice, size_t{4} * kRuleKinds * kWidths * kWidths * kWidths> choices;
  size_t index = (update.rounding ? 2 : 0) + (update.copy ? 1 : 0);
  index = index * kRuleKinds + update.rule.index();
  for (const Dtype dtype : {update.param.dtype, update.grad.dtype, update.states[0].dtype}) {
    index = index * kWidths + static_cast<size_t>(std::countr_zero(dtype_bytes(dtype)));
  }
  return choices[index];
}

UpdatePass find_pass(const Update& update, Isa isa) {
  const PassKey key{static_cast<RuleKind>(update.rule.index()), update.param.dtype,
                    update.grad.dtype, update.states[0].dtype, copy_kind(update)};
  if (update.rounding) return find_noisy_pass(key, isa);
  constexpr OfIsa<UpdatePass (*)(const PassKey&)> kEach{update_pass_scalar, update_pass_neon,
                                                        update_pass_sve256, update_pass_avx2,
                                                        update_pass_avx512};
  return kEach.at(isa)(key);
}

// An update, ready to run.
struct Task {
  UpdatePass pass = nullptr;
  PrefetchChoice* prefetch = nullptr;
  Streams streams;
  Constants constants;
  size_t numel = 0;
  size_t param_element_bytes = 0;
  size_t widest_element_bytes = 0;
  bool in_blocks = false;  // it may be cut at multiples of kCodedElements only
};

// Returns a number that is different for every step of a seed.
uint64_t noise_seed(const Rounding& rounding) {
  return rounding.seed * 0xd1342543de82ef95u +
         static_cast<uint64_t>(rounding.step) * 0x9e3779b97f4a7c15u;
}

Task make_task(const Update& update, Isa isa) {
  Task task;
  task.pass = find_pass(update, isa);
  task.prefetch = &prefetch_of(update);
  task.streams.param = update.param.data;
  task.streams.grad = update.grad.data;
  task.streams.first = update.states[0].data;
  if (update.states.size() > 1) task.streams.second = update.states[1].data;
  if (update.copy) {
    task.streams.copy = update.copy->data;
    task.streams.copy_past_caches = update.copy->bytes() > kCachedCopyBytes;
  }
  task.constants = std::visit([](const auto& rule) { return constants_of(rule); }, update.rule);
  task.numel = update.param.numel();
  task.param_element_bytes = dtype_bytes(update.param.dtype);
  task.widest_element_bytes =
      std::max({dtype_bytes(update.param.dtype), dtype_bytes(update.grad.dtype),
                dtype_bytes(update.states[0].dtype)});
  if (update.rounding) {
    task.in_blocks = true;
    task.streams.noise_seed = noise_seed(*update.rounding);
  }
  if (!update.scales.empty()) {
    task.streams.first_scales = reinterpret_cast<uint8_t*>(update.scales[0].data);
    task.streams.second_scales = reinterpret_cast<uint8_t*>(update.scales.back().data);
  }
  return task;
}

struct Chunk {
  const Task* task = nullptr;
  size_t begin = 0;
  size_t end = 0;
};

size_t chunk_elements(size_t total, size_t threads) {
  const size_t wanted = total / (threads * kChunksPerThread);
  return std::clamp(wanted, kFewestElements, kMostElements);
}

// Appends the chunks of a task. Chunks begin where pages of the parameters begin, if the parameters
// are aligned to their element size. When states are kept in blocks, chunks begin at blocks, near
// the pages.
void cut(const Task& task, size_t elements, std::vector<Chunk>& chunks) {
  const size_t per_page = kBasePageBytes / task.param_element_bytes;
  const size_t step = std::max(elements / per_page, size_t{1}) * per_page;
  const auto address = reinterpret_cast<uintptr_t>(task.streams.param);
  size_t into_page = (address % kBasePageBytes) / task.param_element_bytes;
  if (task.in_blocks) into_page = into_page / kCodedElements * kCodedElements;
  size_t begin = 0;
  while (begin < task.numel) {
    const size_t end = std::min(task.numel, begin == 0 ? step - into_page % step : begin + step);
    chunks.push_back({&task, begin, end});
    begin = end;
  }
}

// Returns the node that most of the chunk's streams are on, judged by their first pages, or -1 if
// it is not known.
int home_of(const Chunk& chunk, const std::vector<TensorView>& views, const os::Kernel& kernel) {
  std::vector<int> nodes;
  for (const TensorView& view : views) {
    const int node = page_home(view.data + chunk.begin * dtype_bytes(view.dtype), kernel);
    if (node >= 0) nodes.insert(nodes.end(), dtype_bytes(view.dtype), node);
  }
  int home = -1;
  std::ptrdiff_t most = 0;
  for (int node : nodes) {
    const std::ptrdiff_t count = std::ranges::count(nodes, node);
    if (count > most) {
      most = count;
      home = node;
    }
  }
  return home;
}

void run(const Chunk& chunk) {
  const Task& task = *chunk.task;
  task.prefetch->run(chunk.end - chunk.begin, kFewestElements, [&](size_t way) {
    Streams streams = task.streams;
    streams.ahead = kPrefetchBytes[way] / task.widest_element_bytes;
    task.pass(streams, chunk.begin, chunk.end, task.constants);
  });
}

std::vector<TensorView> streams_of(const Update& update) {
  std::vector<TensorView> views = {update.param, update.grad};
  views.insert(views.end(), update.states.begin(), update.states.end());
  return views;
}

// Puts every chunk into the queue of its home, if there are several queues.
void share_out(const std::vector<Chunk>& chunks, const std::vector<Task>& tasks,
               const std::vector<Update>& updates, const os::Kernel* kernel,
               WorkQueues<Chunk>& queues) {
  std::vector<TensorView> views;
  const Task* viewed = nullptr;
  for (const Chunk& chunk : chunks) {
    int home = -1;
    if (queues.size() > 1 && kernel != nullptr) {
      if (viewed != chunk.task) {
        viewed = chunk.task;
        views = streams_of(updates[static_cast<size_t>(viewed - tasks.data())]);
      }
      home = home_of(chunk, views, *kernel);
    }
    queues.give(home, chunk);
  }
}

}  // namespace

size_t state_count(const UpdateRule& rule) { return std::holds_alternative<Adam>(rule) ? 2 : 1; }

void run_updates(const std::vector<Update>& updates, WorkerTeam& team,
                 const UpdateOptions& options) {
  check_updates(updates, options.counts);
  std::vector<Task> tasks;
  tasks.reserve(updates.size());
  size_t total = 0;
  for (const Update& update : updates) {
    tasks.push_back(make_task(update, options.isa));
    total += tasks.back().numel;
  }
  std::vector<Chunk> chunks;
  const size_t elements = chunk_elements(total, team.threads());
  for (const Task& task : tasks) cut(task, elements, chunks);
  if (total <= kFewestElements) {  // waking threads would take longer
    for (const Chunk& chunk : chunks) run(chunk);
    return;
  }
  WorkQueues<Chunk> queues(team);
  share_out(chunks, tasks, updates, options.kernel, queues);
  team.run([&queues](size_t group) { queues.drain(group, run); });
}

}  // namespace cxl_offload::kernels
