// One number at a time in plain C++: for every processor, and the oracle of the others.

struct Vector {
  static constexpr size_t kLanes = 1;
  static constexpr size_t kRegisters = 16;
  template <class T>
  using NoNan = T;
  float value;

  static Vector all(float value) { return {value}; }
  template <class T>
  static Vector load(const T* at) {
    return {to_float(*at)};
  }
  static Vector load(const E4m3* at) { return {to_float(*at) / kE4m3Unit}; }
  static Vector load(const int8_t* at) { return {static_cast<float>(*at)}; }
  // Loads `count` elements and puts zeros into the other lanes. It reads no memory beyond them.
  template <class T>
  static Vector load_some(const T* at, size_t count) {
    return count == 0 ? all(0) : load(at);
  }
  void store(float* at) const { *at = value; }
  void store(Bf16* at) const { *at = to_bf16(value); }
  void store(F16* at) const { *at = to_f16(value); }
  // Stores the numbers past the caches.
  template <class T>
  void stream(T* at) const {
    store(at);
  }
  static void wait_for_stores() {}

  // Loads the even elements into one vector and the odd ones into another.
  static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    even = load(at);
    odd = load(at + 1);
  }
  static void store_pair(Bf16* at, Vector even, Vector odd) {
    even.store(at);
    odd.store(at + 1);
  }

  float total() const { return value; }
  float greatest() const { return value; }
  static void totals(const Vector* four, float* to) {
    for (size_t i = 0; i < 4; ++i) to[i] = four[i].value;
  }
};

inline Vector add(Vector a, Vector b) { return {a.value + b.value}; }
inline Vector mul(Vector a, Vector b) { return {a.value * b.value}; }
inline Vector div(Vector a, Vector b) { return {a.value / b.value}; }
// Multiplies and adds, and rounds once on every processor.
inline Vector fma(Vector a, Vector b, Vector c) { return {std::fma(a.value, b.value, c.value)}; }
// Multiplies and adds. It rounds once where the processor has an instruction for that, else twice.
inline Vector mul_add(Vector a, Vector b, Vector c) { return {a.value * b.value + c.value}; }
inline Vector root(Vector a) { return {std::sqrt(a.value)}; }
// Returns 1, -1, or the value itself when it is a zero or a NaN.
inline Vector sign(Vector a) { return {a.value > 0 ? 1.0f : a.value < 0 ? -1.0f : a.value}; }
// Returns the larger of two numbers, and the second one when either is a NaN.
inline Vector larger(Vector a, Vector b) { return {a.value > b.value ? a.value : b.value}; }
inline Vector exponential(Vector a) { return {std::exp(a.value)}; }

// Loads pairs of scales as (step, low). `left` elements are left of the row of pairs.
inline Vector load_pairs(const F16* at, size_t left, GroupScales form) {
  const bool second = left % 2 == 1;
  const float first_half = to_float(at[second ? -1 : 0]);
  const float second_half = to_float(at[second ? 0 : 1]);
  switch (form) {
    case GroupScales::kInverseLow:
      return {second ? second_half : 1 / first_half};
    case GroupScales::kZeroStep:
      return {second ? -(first_half * second_half) : second_half};
    case GroupScales::kLowStep:
      break;
  }
  return {second ? first_half : second_half};
}

// Loads bytes of two 4-bit codes, one byte into each lane.
inline uint8_t load_codes(const std::byte* at) { return static_cast<uint8_t>(*at); }
// Loads words of two bytes of 4-bit codes, one word into each lane.
inline uint16_t load_words(const std::byte* at) {
  uint16_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

// Returns the codes that begin at bit kShift of each word, times 2^kShift.
template <int kShift>
Vector shifted_code(uint32_t words) {
  return {static_cast<float>(words & 15u << kShift)};
}

// The numbers that the codes of a group stand for.
struct Table {
  Table() = default;
  Table(float step, float low) : step(step), low(low) {}
  template <int kShift>
  Vector number(uint32_t codes) const {
    return {static_cast<float>(codes >> kShift & 15) * step + low};
  }

  float step;
  float low;
};
