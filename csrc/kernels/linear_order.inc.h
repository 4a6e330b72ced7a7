// The order in which the products of a panel are computed. The sources of linear layers include
// this file inside of an unnamed namespace, after vector/*.inc.h.
//
// A strip is a few outputs over some columns; a tile is a few rows of x. One tile after another is
// multiplied by a block of outputs, strip by strip, so that later tiles find the weights in the
// second cache. A strip has so few columns that a tile has LinearPanel::near_bytes in them. The
// sums are kept as vectors until the next columns are added to them, so no result depends on how
// the columns are cut.

// So many bytes of weights are prefetched before they are multiplied, all outputs of a strip
// together: a core that reads 25 to 35 GB/s takes 250 to 350 ns for them, twice the latency of
// DRAM. They fit a first cache of 32 KiB beside the numbers of x.
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
  size_t output = 0;  // the first output
  size_t apart = 1;   // from one output of the strip to the next
  size_t begin = 0;   // the columns are [begin, end)
  size_t end = 0;
  // How many bytes beyond those that are read weights are prefetched: `ahead`, and `jump` from byte
  // `turn` of a row on, which leads to the next strip.
  ptrdiff_t ahead = 0;
  ptrdiff_t turn = 0;
  ptrdiff_t jump = 0;
  bool first = false;      // these are the first columns of the order
  bool last = false;       // these are the last columns, after which the sums are complete
  Vector* sums = nullptr;  // where the sums are kept until the next columns are added to them
};

// Whether strips of R outputs read at least as many bytes of weights as of x with tiles of M rows.
// `line` columns have 64 bytes of weights, and a number of x has `x_bytes` bytes.
//
// Such strips are spread over the outputs. Output r of a strip is the one after output r of the
// strip before. So each of R streams reads one row of weights after the other, and the hardware's
// prefetchers go on from row to row. The weights are prefetched into the first cache, into the
// second one, or not at all, as is fastest (LinearPanel::prefetch). In other strips x fills the
// first cache; their outputs are neighbours, and their weights are prefetched into the second
// cache.
template <size_t M, size_t R>
constexpr bool is_spread(size_t line, size_t x_bytes) {
  return M * x_bytes * line <= R * kLineBytes;
}

// How some columns of a panel are cut.
struct Order {
  Order(const LinearPanel& panel, size_t line, size_t x_bytes, size_t begin, size_t end)
      : panel(panel), line(line), x_bytes(x_bytes), begin(begin), end(end), columns(end - begin) {}

  // Cuts the columns for strips of R outputs and tiles of M rows. It does not cut them where strips
  // are spread: reading long rows of weights then gains more than keeping x in the first cache.
  template <size_t M, size_t R>
  void cut() {
    if (is_spread<M, R>(line, x_bytes)) return;
    const size_t fit = panel.near_bytes / (M * x_bytes) / line * line;
    if (fit >= columns) return;
    columns = fit;
    const size_t outputs = std::min(panel.outputs, panel.block_outputs);
    waiting = std::make_unique_for_overwrite<Vector[]>(outputs * M);
  }

  // Returns where the weights of an output are, in bytes from those of the panel's first.
  ptrdiff_t place(size_t output, size_t column) const {
    const auto within = static_cast<ptrdiff_t>(column / line * kLineBytes);
    const auto rows = [&](size_t count) {
      return static_cast<ptrdiff_t>(count * panel.weight_step) + within;
    };
    if (output < panel.outputs) return rows(output);
    return panel.next - panel.weight + rows(output - panel.outputs);
  }

  // Returns the distance in bytes from the weights of this strip to those `strips` strips later, or
  // 0 if no weights are left. The block has the outputs [block, stop); the first outputs of its
  // strips are `step_outputs` apart and end before `strips_stop`.
  ptrdiff_t distance(const Step& step, size_t strips, size_t step_outputs, size_t block,
                     size_t strips_stop, size_t stop) const {
    size_t output = step.output + strips * step_outputs;
    size_t column = step.begin;
    if (output >= strips_stop) {
      const bool more = step.begin + columns < end;  // else the next outputs follow
      output = (more ? block : stop) + output - strips_stop;
      column = more ? step.begin + columns : begin;
    }
    if (output >= panel.outputs) return 0;
    return place(output, column) - place(step.output, step.begin);
  }

  // Returns how many outputs the block has that begins at `output`, at most; those after the
  // panel's are those of the unit that the thread takes next.
  size_t outputs_at(size_t output) const {
    if (output < panel.outputs) return std::min(panel.outputs - output, panel.block_outputs);
    const bool all_columns = begin == 0 && end == panel.width;
    return all_columns ? std::min(panel.next_outputs, panel.block_outputs) : 0;
  }

  const LinearPanel& panel;
  const size_t line;
  const size_t x_bytes;
  const size_t begin;
  const size_t end;
  size_t columns;                     // how many a strip has
  bool whole_strips = false;          // whether at least a strip is prefetched, as it is read twice
  std::unique_ptr<Vector[]> waiting;  // [outputs of a block][rows of a tile]
};

// The strips of R outputs in a block of outputs, [begin, stop).
template <size_t M, size_t R>
struct Block {
  Block(const Order& order, size_t begin)
      : order(order),
        begin(begin),
        stop(std::min(order.panel.outputs, begin + order.panel.block_outputs)),
        strips((stop - begin) / R),
        spread(is_spread<M, R>(order.line, order.x_bytes)) {}

  size_t apart() const { return spread ? strips : 1; }
  size_t step_outputs() const { return spread ? 1 : R; }  // from one strip to the next

  // Says where the weights that are read later are prefetched from.
  void look_ahead(Step& step) const {
    const size_t lines = (step.end - step.begin + order.line - 1) / order.line;
    constexpr size_t kWanted = kAheadBytes / kLineBytes / R;  // of each output
    const bool within = spread && kWanted < lines && !order.whole_strips;
    const size_t later = within ? 1 : (kWanted + lines - 1) / std::max(lines, size_t{1});
    step.ahead = step.jump =
        order.distance(step, later, step_outputs(), begin, begin + strips * step_outputs(), stop);
    step.turn = order.place(0, step.begin);
    if (!within) return;
    const auto before = static_cast<ptrdiff_t>((lines - kWanted) * kLineBytes);
    step.ahead = static_cast<ptrdiff_t>(kWanted * kLineBytes);
    step.turn += before;
    if (step.jump != 0) step.jump -= before;
  }

  // Says which weights of the next block strip `index` of `count` prefetches: of R outputs, those
  // of the next strip among them. All tiles of this block take part, so that the memory works all
  // the time, not for the first tile only.
  void fetch_next(Step& step, size_t index, size_t count) const {
    const size_t outputs = order.outputs_at(stop);
    step.ahead = step.jump = 0;
    if (outputs == 0) return;
    const size_t first = outputs * index / count;
    step.ahead = step.jump =
        order.place(stop + first, step.begin) - order.place(step.output, step.begin);
  }

  const Order& order;
  const size_t begin;
  const size_t stop;
  const size_t strips;
  const bool spread;
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
  const size_t tiles = panel.rows / M;
  // Whether the weights of a block were prefetched while those before it were multiplied. With a
  // single tile none are: the memory works all the time as it is.
  bool fetched = tiles > 1 && panel.fetched && order.begin == 0;
  for (size_t begin = 0; begin < panel.outputs; begin += panel.block_outputs) {
    const Block<M, R> block(order, begin);
    const size_t first = fetched ? 0 : 1;  // the tile that begins to prefetch the next block
    Step step;
    step.apart = block.apart();
    for (step.row = 0; step.row < panel.rows; step.row += M) {
      const size_t tile = step.row / M;
      for (step.begin = order.begin; step.begin < order.end; step.begin += order.columns) {
        step.end = std::min(step.begin + order.columns, order.end);
        step.first = step.begin == order.begin;
        step.last = step.end == order.end;
        step.sums = order.waiting.get();
        step.output = block.begin;
        for (size_t i = 0; i < block.strips; ++i, step.output += block.step_outputs()) {
          if (tile < first) {
            block.look_ahead(step);
          } else {
            block.fetch_next(step, (tile - first) * block.strips + i,
                             (tiles - first) * block.strips);
          }
          visit_step<M, R>(step, visit);
        }
        step.ahead = step.turn = step.jump = 0;
        step.output = block.begin + block.strips * R;
        for (; step.output < block.stop; ++step.output) visit_step<M, 1>(step, visit);
      }
    }
    fetched = tiles > 1;
  }
}
