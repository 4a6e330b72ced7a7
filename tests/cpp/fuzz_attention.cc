// What libFuzzer drives, and test_fuzz_attention.cc replays: decode attention over caches of any
// type, strides, offsets, blocks, masks, windows and teams, against the formula in double.
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "core/error.h"
#include "fuzz_arrays.h"
#include "fuzz_input.h"
#include "kernels/attention.h"
#include "kernels/attention_pass.h"

namespace cxl_offload::kernels {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();
const std::vector<Dtype> kWritten = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
const std::vector<Dtype> kCached = {Dtype::kFloat16,    Dtype::kBfloat16,   Dtype::kFloat32,
                                    Dtype::kFloat8E4m3, Dtype::kFloat8E5m2, Dtype::kUint8};

// A cache in exactly the memory that its strides span: dimensions in any order of memory, with gaps
// between the rows. `inner` dimensions at the end stay contiguous.
struct Strided {
  Strided(Input& input, Dtype dtype, std::vector<int64_t> shape, size_t inner) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i-- > shape.size() - inner;)
      strides[i] = strides[i + 1] * shape[i + 1];
    int64_t unit = 1;
    for (size_t i = shape.size() - inner; i < shape.size(); ++i) unit *= shape[i];
    const size_t order = input.below(6);
    static constexpr size_t kOrders[6][3] = {{2, 1, 0}, {1, 2, 0}, {2, 0, 1},
                                             {0, 2, 1}, {1, 0, 2}, {0, 1, 2}};
    for (size_t dimension : kOrders[order]) {
      const int64_t gap = input.one_in(4) ? static_cast<int64_t>(input.below(20)) : 0;
      const bool shared = dimension != 2 && input.one_in(16);  // one for all, as expand() makes it
      strides[dimension] = shared ? 0 : unit + gap;
      if (!shared) unit = strides[dimension] * std::max<int64_t>(shape[dimension], 1);
    }
    int64_t last = 0;
    bool empty = false;
    for (size_t i = 0; i < shape.size(); ++i) {
      last += strides[i] * (shape[i] - 1);
      empty = empty || shape[i] == 0;
    }
    array.emplace(dtype, empty ? 0 : static_cast<size_t>(last + 1), input.below(40));
    view = make_view(reinterpret_cast<uintptr_t>(array->data()), dtype, std::move(shape), strides);
  }
  int64_t index(int64_t outer, int64_t head, int64_t row) const {
    return outer * view.strides[0] + head * view.strides[1] + row * view.strides[2];
  }

  std::optional<GuardedArray> array;
  TensorView view;
};

// One call with all that it reads.
struct Case {
  explicit Case(Input& input) : numbers(input.byte()) {
    dtype = input.any_of(kCached);
    codes = dtype == Dtype::kUint8;
    batch = static_cast<int64_t>(input.below(4));
    kv_heads = 1 + static_cast<int64_t>(input.below(6));
    const int64_t group =
        1 + static_cast<int64_t>(input.one_in(8) ? input.below(40) : input.below(5));
    heads = kv_heads * group;
    choose_rows(input);
    choose_cache(input);
    choose_limits(input);
    const auto queries = static_cast<size_t>(batch * heads);
    const auto count = queries * static_cast<size_t>(dim);
    q.emplace(input.any_of(kWritten), count, input.below(40));
    q->fill(Filling::kUnit, false, numbers);
    out.emplace(input.any_of(kWritten), count, input.below(40));
    if (input.below(2) == 0) sums.emplace(Dtype::kFloat32, queries, input.below(40));
    scale = input.any_of<double>({0.125, 1, 0, -0.5, 3});
    window = input.below(4) == 0 ? static_cast<int64_t>(input.byte()) * 2 : 0;
    best_products = input.below(4) != 0;
    inverse = input.below(2) == 0;
    choose_scales(input, k_scales);
    choose_scales(input, v_scales);
  }

  void choose_rows(Input& input) {
    groups = 1 + static_cast<int64_t>(input.below(3));
    each = input.one_in(4) ? 128 : 64;
    dim = codes ? (groups - 1) * each + 1 + static_cast<int64_t>(input.size(each - 1))
                : 1 + static_cast<int64_t>(input.below(4) == 0 ? input.byte() : input.below(70));
    if (codes && input.below(2) == 0) dim = groups * each;
    const size_t kind = input.below(16);
    const auto more = static_cast<int64_t>(input.byte());
    seq = kind < 8 ? more % 40 : kind < 14 ? 200 + more / 2 : kind == 14 ? 500 + more : 2100 + more;
    if (kind == 15)
      dim = std::min<int64_t>(dim, codes ? dim : 16), batch = std::min<int64_t>(batch, 1);
  }

  void choose_cache(Input& input) {
    std::vector<int64_t> shape = {batch, kv_heads, seq, codes ? groups * each / 2 : dim};
    if (input.below(3) == 0) {  // in blocks
      block = 1 + static_cast<int64_t>(input.below(33));
      columns = (seq + block - 1) / block + static_cast<int64_t>(input.below(2));
      shape[0] = std::max<int64_t>(1, batch * columns / 2);
      shape[2] = block;
      for (int64_t i = 0; i <= batch * (columns + 1); ++i) {
        table.push_back(static_cast<int32_t>(numbers.next() % static_cast<uint64_t>(shape[0])));
      }
    }
    k.emplace(input, dtype, shape, 1);
    v.emplace(input, dtype, shape, 1);
    fill(*k->array);
    fill(*v->array);
    if (!codes) return;
    shape[3] = groups;
    shape.push_back(2);
    k_groups.emplace(input, Dtype::kFloat16, shape, 2);
    v_groups.emplace(input, Dtype::kFloat16, shape, 2);
    k_groups->array->fill(Filling::kUnit, true, numbers);
    v_groups->array->fill(Filling::kUnit, true, numbers);
  }

  // Codes may be any; of 8-bit numbers those with small exponents, no NaN.
  void fill(GuardedArray& array) {
    array.fill(codes ? Filling::kAnyBits : Filling::kUnit, false, numbers);
    if (codes || dtype_bytes(dtype) != 1) return;
    for (size_t i = 0; i < array.count(); ++i) {
      const auto bits = static_cast<uint8_t>(numbers.next() >> 56);
      array.data()[i] = std::byte((bits & 0x80) | ((bits & 0x7f) % 0x41));
    }
  }

  void choose_limits(Input& input) {
    if (block > 0 || input.below(2) == 0) {
      for (int64_t i = 0; i < batch; ++i) {
        const auto part = static_cast<int64_t>(input.byte());
        lengths.push_back(part > 250 ? seq : seq * part / 251);
      }
    }
    if (input.below(4) != 0) return;
    mask_columns = (block > 0 ? columns * block : seq) + static_cast<int64_t>(input.below(3));
    const uint64_t some = 1 + input.below(8);
    for (int64_t i = 0; i < batch * mask_columns; ++i) {
      mask.push_back(numbers.next() % some == 0 || some == 1 ? 1 : 0);
    }
  }

  void choose_scales(Input& input, std::vector<float>& scales) {
    const size_t kind = input.below(4);
    const size_t count = kind == 0 ? 1 : kind == 1 ? static_cast<size_t>(kv_heads) : 0;
    for (size_t i = 0; i < count; ++i) scales.push_back(numbers.unit() * 2);
  }

  Attention attention() {
    Attention a;
    a.q = q->view();
    a.out = out->view();
    a.q.shape = a.out.shape = {batch, heads, dim};
    a.q.strides = a.out.strides = {heads * dim, dim, 1};
    a.k = k->view;
    a.v = v->view;
    if (codes) a.k_groups = k_groups->view, a.v_groups = v_groups->view;
    a.group_scales = inverse ? GroupScales::kInverseLow : GroupScales::kLowStep;
    a.k_scales = k_scales;
    a.v_scales = v_scales;
    a.lengths = lengths;
    if (block > 0) a.table = {table.data(), columns, columns + 1};
    if (!mask.empty()) a.mask = mask.data(), a.mask_columns = mask_columns;
    a.window = window;
    a.scale = scale;
    a.integers = a.bf16_products = best_products;
    if (sums) a.log_sum_exp = reinterpret_cast<float*>(sums->data());
    return a;
  }

  // Number `i` of a row of K or V.
  double number(const Strided& cache, const std::optional<Strided>& worth, int64_t outer,
                int64_t head, int64_t row, int64_t i) const {
    const int64_t at = cache.index(outer, head, row);
    if (!codes) return number_at(cache.view.data, dtype, at + i);
    const auto byte = static_cast<int>(cache.view.data[at + i / 2]);
    const int code = i % 2 == 0 ? byte >> 4 : byte & 15;
    const int64_t pair = worth->index(outer, head, row) + i / each * 2;
    const double first = number_at(worth->view.data, Dtype::kFloat16, pair);
    const double second = number_at(worth->view.data, Dtype::kFloat16, pair + 1);
    return inverse ? code / first + second : code * second + first;
  }

  bool attended(int64_t sequence, int64_t row) const {
    const int64_t end = lengths.empty() ? seq : lengths[static_cast<size_t>(sequence)];
    if (row >= end || (window > 0 && row < end - window)) return false;
    return mask.empty() || mask[static_cast<size_t>(sequence * mask_columns + row)] != 0;
  }

  Numbers numbers;
  Dtype dtype = Dtype::kFloat32;
  bool codes = false, best_products = true, inverse = false;
  int64_t batch = 0, heads = 0, kv_heads = 0, seq = 0, dim = 0, groups = 0, each = 64;
  int64_t block = 0, columns = 0, mask_columns = 0, window = 0;
  double scale = 1;
  std::optional<Strided> k, v, k_groups, v_groups;
  std::optional<GuardedArray> q, out, sums;
  std::vector<int64_t> lengths;
  std::vector<int32_t> table;
  std::vector<uint8_t> mask;
  std::vector<float> k_scales, v_scales;
};

double factor(const std::vector<float>& scales, int64_t head) {
  if (scales.empty()) return 1;
  return scales[scales.size() == 1 ? 0 : static_cast<size_t>(head)];
}

// The formula, and how far from it float arithmetic may end.
void check_query(const Case& c, int64_t sequence, int64_t head) {
  const int64_t kv = head / (c.heads / c.kv_heads);
  const int64_t query = sequence * c.heads + head;
  const auto dim = static_cast<size_t>(c.dim);
  std::vector<double> q(dim), sum(dim), size(dim), value(dim);
  double largest_q = 0;
  for (size_t i = 0; i < dim; ++i) {
    q[i] = number_at(c.q->data(), c.q->dtype(), query * c.dim + static_cast<int64_t>(i));
    largest_q = std::max(largest_q, std::abs(q[i]));
  }
  double most = kLowest, total = 0, slip = 0;
  for (int64_t row = 0; row < c.seq; ++row) {
    if (!c.attended(sequence, row)) continue;
    const int64_t outer =
        c.block > 0 ? c.table[static_cast<size_t>(sequence * (c.columns + 1) + row / c.block)]
                    : sequence;
    const int64_t at = c.block > 0 ? row % c.block : row;
    const double times = c.scale * factor(c.k_scales, kv);
    double score = 0, sizes = 0;
    for (size_t i = 0; i < dim; ++i) {
      const double number = c.number(*c.k, c.k_groups, outer, kv, at, static_cast<int64_t>(i));
      score += times * q[i] * number;
      sizes += std::abs(times) * (c.codes ? largest_q : std::abs(q[i])) * std::abs(number);
    }
    slip = std::max(slip, sizes * (c.codes ? 4e-6 : 1e-6) + std::abs(score) * 1e-6);
    if (score > most) {
      const double down = most == kLowest ? 0 : std::exp(most - score);
      total *= down;
      for (size_t i = 0; i < dim; ++i) sum[i] *= down, size[i] *= down;
      most = score;
    }
    const double weight = std::exp(score - most);
    total += weight;
    for (size_t i = 0; i < dim; ++i) {
      value[i] = c.number(*c.v, c.v_groups, outer, kv, at, static_cast<int64_t>(i));
      sum[i] += weight * value[i];
      size[i] += weight * std::abs(value[i]);
    }
  }
  const double rounding = c.out->dtype() == Dtype::kFloat32    ? 1e-6
                          : c.out->dtype() == Dtype::kBfloat16 ? 4e-3
                                                               : 5e-4;
  const double times = factor(c.v_scales, kv);
  for (size_t i = 0; i < dim; ++i) {
    const double right = total == 0 ? 0 : times * sum[i] / total;
    const double sizes = total == 0 ? 0 : std::abs(times) * size[i] / total;
    const double got =
        number_at(c.out->data(), c.out->dtype(), query * c.dim + static_cast<int64_t>(i));
    const double off = std::abs(right) * rounding + sizes * (4 * slip + 2e-5) + 1e-7;
    // float16 ends at 65504, and what rounds to more is infinite.
    const bool too_large = c.out->dtype() == Dtype::kFloat16 && std::abs(right) + off >= 65520 &&
                           std::isinf(got) && std::signbit(got) == std::signbit(right);
    require(too_large || std::abs(got - right) <= off,
            "number " + std::to_string(i) + " of query " + std::to_string(query) + " is " +
                std::to_string(got) + ", not " + std::to_string(right));
  }
  if (!c.sums) return;
  const double right = total == 0 ? kLowest : most + std::log(total);
  const double got = number_at(c.sums->data(), Dtype::kFloat32, query);
  require(got == right || std::abs(got - right) <= slip + 1e-5 + std::abs(right) * 1e-6,
          "the logarithm of the sum is " + std::to_string(got) + ", not " + std::to_string(right));
}

// Makes the call unfit.
void spoil(Input& input, Attention& a) {
  const size_t how = input.below(10);
  if (how == 0) a.v.shape[2] += 1;
  // A row of codes is padded to whole groups of 128 at most: one more number might fit.
  if (how == 1) a.q.shape[2] += 129, a.out.shape[2] += 129;
  if (how == 2) a.q.dtype = Dtype::kFloat8E4m3;
  if (how == 3) a.scale = std::numeric_limits<double>::quiet_NaN();
  if (how == 4) a.window = -1;
  if (how == 5) a.lengths.resize(static_cast<size_t>(a.q.shape[0]) + 2);
  if (how == 6) a.k_scales.assign(static_cast<size_t>(a.k.shape[1]) + 1, 1.0f);
  if (how == 7) a.k.shape.pop_back();
  if (how == 8) a.v.dtype = a.k.dtype == Dtype::kFloat32 ? Dtype::kFloat16 : Dtype::kFloat32;
  if (how == 9) a.out.shape[0] += 1;
}

void fuzz_attention(Input& input) {
  const FlushedDenormals mode(input.one_in(16));
  const Isa isa = input.any_of(supported_isas());
  WorkerTeam& team = any_team(input);
  const bool unfit = input.one_in(16);
  Case c(input);
  Attention a = c.attention();
  if (unfit) {
    spoil(input, a);
    bool refused = false;
    try {
      run_attention(a, team, isa);
    } catch (const InvalidArgument&) {
      refused = true;
    }
    return require(refused, "a call that does not fit was run");
  }
  run_attention(a, team, isa);
  for (int64_t sequence = 0; sequence < c.batch; ++sequence) {
    for (int64_t head = 0; head < c.heads; ++head) check_query(c, sequence, head);
  }
  require(c.out->guard_is_whole(), "bytes before the result were written");
  require(!c.sums || c.sums->guard_is_whole(), "bytes before the logarithms were written");
  const GuardedArray first(*c.out);
  run_attention(a, team_of({1}), isa);
  require(first.same_bytes(*c.out), "another result with one thread");
}

}  // namespace
}  // namespace cxl_offload::kernels

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  cxl_offload::kernels::fuzz_attention(input);
  return 0;
}
