// The order in which the products of a panel are computed. The sources of linear layers include
// this file inside of an unnamed namespace, after vector/*.inc.h.
//
// A strip is a few outputs over some columns; a tile is a few rows of x. One tile after another is
// multiplied by kLinearOutputs outputs, strip by strip, so that later tiles find the weights in the
// second cache. A strip has so few columns that a tile stays in the first cache for all of these
// strips. The sums are kept as vectors until the next columns are added to them, so no result
// depends on how the columns are cut.

// The most bytes that a tile has in the columns of a strip: half of a first cache of 32 KiB. The
// other half is for weights and sums.
constexpr size_t kNearBytes = size_t{16} << 10;
// Weights are prefetched at least so many bytes before their strip begins: a core that reads 25 to
// 35 GB/s takes 250 to 350 ns for them, twice the latency of DRAM. Twice or half as many made no
// difference that could be measured.
constexpr size_t kAheadBytes = 8192;

// Keeps a number that several products use in a register. Otherwise compilers load it again for
// each product, and a processor loads no more vectors in a cycle than it multiplies.
CXL_OFFLOAD_VECTOR Vector in_register(Vector a) {
#if CXL_OFFLOAD_X86
  if constexpr (Vector::kLanes > 1) asm("" : "+v"(a.value));
#elif CXL_OFFLOAD_NEON
  if constexpr (Vector::kLanes > 1) asm("" : "+w"(a.value));
#endif
  return a;
}

// One strip that is multiplied by one tile.
struct Step {
  size_t row = 0;
  size_t output = 0;
  size_t begin = 0;  // the columns are [begin, end)
  size_t end = 0;
  ptrdiff_t ahead = 0;     // bytes from the weights to those that are prefetched meanwhile
  bool first = false;      // these are the first columns of the order
  bool last = false;       // these are the last columns, after which the sums are complete
  Vector* sums = nullptr;  // where the sums are kept until the next columns are added to them
};

// How some columns of a panel are cut. `line` columns have 64 bytes of weights.
struct Order {
  Order(const LinearPanel& panel, size_t line, size_t begin, size_t end)
      : panel(panel), line(line), begin(begin), end(end), columns(end - begin) {}

  // Cuts the columns for strips of R outputs and tiles of M rows, where a number of x has `x_bytes`
  // bytes. It does not cut them where a strip reads no more bytes of x than of weights: reading
  // long rows of weights then gains more than keeping x in the first cache.
  template <size_t M, size_t R>
  void cut(size_t x_bytes) {
    if (M * x_bytes * line <= R * kLineBytes) return;
    const size_t fit = kNearBytes / (M * x_bytes) / line * line;
    if (fit >= columns) return;
    columns = fit;
    const size_t outputs = std::min(panel.outputs, kLinearOutputs);
    waiting = std::make_unique_for_overwrite<Vector[]>(outputs * M);
  }

  ptrdiff_t place(size_t output, size_t column) const {
    return static_cast<ptrdiff_t>(output * panel.weight_step + column / line * kLineBytes);
  }

  // Returns the distance in bytes from the weights of this strip of R outputs to those that are
  // prefetched while it is multiplied. The hardware's own prefetchers stop at the end of a page and
  // of a strip. The block has the outputs [block, stop). Returns 0 if no weights are left.
  template <size_t R>
  ptrdiff_t ahead(const Step& step, size_t block, size_t stop) const {
    const size_t strip = std::max(columns / line * kLineBytes, size_t{kLineBytes}) * R;
    const size_t next = step.output + (kAheadBytes + strip - 1) / strip * R;
    if (next + R <= stop) return place(next, step.begin) - place(step.output, step.begin);
    const size_t beyond = next > stop ? next - stop : 0;
    const bool more = step.begin + columns < end;  // else the next outputs follow
    const size_t output = (more ? block : stop) + beyond;
    const size_t column = more ? step.begin + columns : begin;
    if (output + R > panel.outputs) return 0;
    return place(output, column) - place(step.output, step.begin);
  }

  const LinearPanel& panel;
  const size_t line;
  const size_t begin;
  const size_t end;
  size_t columns;                     // how many a strip has
  std::unique_ptr<Vector[]> waiting;  // [outputs of a block][rows of a tile]
};

template <size_t M, size_t R, class Visit>
CXL_OFFLOAD_VECTOR void visit_step(Step& step, const Visit& visit) {
  visit.template operator()<R>(step);
  if (step.sums != nullptr) step.sums += M * R;
}

// Calls visit<outputs>(step) for strips of R outputs and tiles of M rows. Where fewer than R
// outputs are left, a strip has one output.
template <size_t M, size_t R, class Visit>
void visit_steps(const Order& order, const Visit& visit) {
  const LinearPanel& panel = order.panel;
  for (size_t block = 0; block < panel.outputs; block += kLinearOutputs) {
    const size_t stop = std::min(panel.outputs, block + kLinearOutputs);
    Step step;
    for (step.row = 0; step.row < panel.rows; step.row += M) {
      for (step.begin = order.begin; step.begin < order.end; step.begin += order.columns) {
        step.end = std::min(step.begin + order.columns, order.end);
        step.first = step.begin == order.begin;
        step.last = step.end == order.end;
        step.sums = order.waiting.get();
        for (step.output = block; step.output + R <= stop; step.output += R) {
          step.ahead = step.row == 0 ? order.ahead<R>(step, block, stop) : 0;
          visit_step<M, R>(step, visit);
        }
        step.ahead = 0;
        for (; step.output < stop; ++step.output) visit_step<M, 1>(step, visit);
      }
    }
  }
}
