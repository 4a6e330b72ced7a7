// Whole numbers beside scalar.inc.h.

// A whole number of 32 bits, without sign.
struct Words {
  uint32_t value;

  static Words all(uint32_t value) { return {value}; }
  // Returns 0, 1, 2, ..., one number in each lane.
  static Words count() { return {0}; }
  static Words load(const uint8_t* at) { return {*at}; }
  // Loads bytes and copies the highest bit of each into all bits above it.
  static Words load_signed(const uint8_t* at) {
    return {static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(*at)))};
  }
  // Stores the low byte.
  void store(uint8_t* at) const { *at = static_cast<uint8_t>(value); }
  uint32_t greatest() const { return value; }
};

inline Words add(Words a, Words b) { return {a.value + b.value}; }
inline Words sub(Words a, Words b) { return {a.value - b.value}; }
inline Words mul(Words a, Words b) { return {a.value * b.value}; }
inline Words both(Words a, Words b) { return {a.value & b.value}; }
inline Words either(Words a, Words b) { return {a.value | b.value}; }
inline Words differing(Words a, Words b) { return {a.value ^ b.value}; }
inline Words larger(Words a, Words b) { return {std::max(a.value, b.value)}; }
// Returns the bits of `a` where the mask has ones, and those of `b` elsewhere.
inline Words chosen(Words mask, Words a, Words b) {
  return {(mask.value & a.value) | (~mask.value & b.value)};
}
template <int kBits>
Words up(Words a) {
  return {a.value << kBits};
}
template <int kBits>
Words down(Words a) {
  return {a.value >> kBits};
}
inline Words bits_of(Vector a) { return {std::bit_cast<uint32_t>(a.value)}; }
inline Vector number_of(Words a) { return {std::bit_cast<float>(a.value)}; }
// Stores numbers as bfloat16. A number is rounded up where `noise`, of 16 bits, plus the 16 bits
// that bfloat16 has no room for carries into the bits above.
inline void store_noisy(Vector a, Words noise, Bf16* at) {
  if (std::isnan(a.value)) return a.store(at);
  at->bits = static_cast<uint16_t>((bits_of(a).value + noise.value) >> 16);
}
