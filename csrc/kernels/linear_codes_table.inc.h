// Layers of 4-bit codes where a vector has the numbers of all 16 codes of a group, or has one lane.
// The sources of such instruction sets include this file after linear_loop.inc.h.

template <size_t R>
struct Weights<Codes, R, true> {
  CXL_OFFLOAD_VECTOR Weights(const LinearPanel& panel, const Step&, size_t group) {
    const float* pair = panel.tables + 2 * group;
    const size_t step = 2 * (panel.width / panel.group);
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) table[r] = Table(pair[r * step], pair[r * step + 1]);
  }
  template <size_t kHalf>
  CXL_OFFLOAD_VECTOR Vector half(size_t r, const std::byte* row, size_t at) const {
    return table[r].template number<kHalf == 0 ? 4 : 0>(load_codes(row + at / 2));
  }

  Table table[R];
};

void prepare_codes(const LinearInput& input) { prepare<true>(input); }

template <size_t M, size_t R>
void multiply_codes(const LinearPanel& panel, const Step& step) {
  multiply_strip<Codes, M, R, true>(panel, step);
}
