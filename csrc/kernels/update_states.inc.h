// States that take fewer bytes than float32, written once over `Vector` and `Words`. This file says
// how a block of them is read, and how it is rounded at random when it is written. It is included
// like update_loop.inc.h.
//
// Blocks have kCodedElements elements, counted from the first of the parameter. docs/adam.md says
// which number each 8-bit code stands for.

CXL_OFFLOAD_VECTOR uint64_t mixed(uint64_t value) {  // the finalizer of splitmix64
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Makes the random bits of the elements of a block, one after another. They depend only on the
// seed, the step and the element. Each element adds a fixed number, 2^20 divided by the golden
// ratio, to the bits of the one before. Such a sequence fills its range evenly, so a block rounds
// up about as often as it should.
class Noise {
 public:
  CXL_OFFLOAD_VECTOR Noise() {}
  CXL_OFFLOAD_VECTOR Noise(uint64_t seed, uint64_t block) {
    const auto key = static_cast<uint32_t>(mixed(seed + block * kGolden) >> 32);
    at_ = add(mul(Words::count(), Words::all(kStep)), Words::all(key));
  }
  CXL_OFFLOAD_VECTOR Words next() {
    const Words x = at_;
    at_ = add(at_, Words::all(kStep * static_cast<uint32_t>(Vector::kLanes)));
    return x;
  }

 private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  static constexpr uint32_t kStep = 0x9e377;
  Words at_ = Words::all(0);
};

// The unit of the codes of a block. It is a power of two, kept as the exponent of a float32. If it
// is 0, all elements of the block are zero; if it is 255, one of them is not finite.
struct Scale {
  uint8_t exponent;

  // `added` is added to the bits of the greatest magnitude, so that no code is above the last one.
  CXL_OFFLOAD_VECTOR static Scale of(uint32_t greatest, uint32_t added) {
    const uint32_t exponent = (greatest + added) >> 23;
    return {static_cast<uint8_t>(exponent >= 254 ? 255 : exponent)};
  }
  CXL_OFFLOAD_VECTOR bool has_codes() const { return exponent != 0 && exponent != 255; }
  CXL_OFFLOAD_VECTOR float value() const {
    return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
  }
  CXL_OFFLOAD_VECTOR float inverse() const {
    return has_codes() ? std::bit_cast<float>((254u - exponent) << 23) : 0;
  }
};

CXL_OFFLOAD_VECTOR Words size_bits(Vector value) {
  return both(bits_of(value), Words::all(0x7fffffff));
}

constexpr uint32_t kLeastBits = 112u << 23;  // the bits of 2^-15 as float32

// A code is a sign and 7 bits of a magnitude. The magnitude is a float32, of which the code keeps
// the lowest 4 bits of the exponent and the highest 3 bits of the fraction. Before that 2^-15 is
// added to the magnitude, so that codes near zero are evenly spaced.
struct SignedCode {
  static constexpr bool kSigned = true;

  // `least` is -2^-15 times the scale.
  CXL_OFFLOAD_VECTOR static Vector read(const uint8_t* at, Vector scale, Vector least) {
    const Words code = Words::load_signed(at);
    const Words bits = chosen(Words::all(0x7f00000), up<20>(code), Words::all(kLeastBits));
    const Vector magnitude = fma(number_of(bits), scale, least);
    return number_of(chosen(Words::all(0x80000000u), code, bits_of(magnitude)));
  }
  CXL_OFFLOAD_VECTOR static Scale scale_of(uint32_t greatest) {
    return Scale::of(greatest, 0x100100);
  }
  // The code is in the low byte.
  CXL_OFFLOAD_VECTOR static Words code(Vector value, Vector inverse, Words noise) {
    const Vector shifted = fma(number_of(size_bits(value)), inverse, Vector::all(0x1p-15f));
    const Words rounded = add(bits_of(shifted), both(noise, Words::all(0xfffff)));
    static_assert((kLeastBits >> 20) % 128 == 0);
    return chosen(Words::all(0x7f), down<20>(rounded), down<24>(bits_of(value)));
  }
};

// A code of 8 bits for a number that is not negative. The number is a float32 of at least 2^-15, of
// which the code keeps the lowest 4 bits of the exponent and the highest 4 bits of the fraction.
// Zero has no code, because the number is a divisor.
struct RootCode {
  static constexpr bool kSigned = false;

  CXL_OFFLOAD_VECTOR static Vector read(const uint8_t* at, Vector scale, Vector) {
    return mul(number_of(either(up<19>(Words::load(at)), Words::all(kLeastBits))), scale);
  }
  CXL_OFFLOAD_VECTOR static Scale scale_of(uint32_t greatest) {
    return Scale::of(greatest, 0x80000);
  }
  // The code is in the low byte.
  CXL_OFFLOAD_VECTOR static Words code(Vector value, Vector inverse, Words noise) {
    const Words bits = larger(bits_of(mul(value, inverse)), Words::all(kLeastBits));
    static_assert((kLeastBits >> 19) % 256 == 0);
    return down<19>(add(bits, both(noise, Words::all(0x7ffff))));
  }
};

// Reads and writes one state of a block. The new values are written after all of them are known,
// because their scale depends on the greatest. The scale is a member of a local object: no store
// through a pointer can change it, so the compiler keeps it in a register.
template <class Code>
struct CodedState {
  using Element = uint8_t;

  // It is written out because the compiler would make its own for every processor, without the
  // instruction set of this file.
  CXL_OFFLOAD_VECTOR CodedState() {}
  // Multiplies what is read by `factor`.
  CXL_OFFLOAD_VECTOR void begin(Element* at, uint8_t* scale_at, float factor, float* room) {
    codes = at;
    kept = room;
    exponent = scale_at;
    const float value = Scale{*exponent}.value() * factor;
    scale = Vector::all(value);
    least = Vector::all(value * -0x1p-15f);
    greatest = Words::all(0);
  }
  CXL_OFFLOAD_VECTOR Vector read(size_t i) const { return Code::read(codes + i, scale, least); }
  CXL_OFFLOAD_VECTOR void keep(size_t i, Vector value) {
    value.store(kept + i);
    greatest = larger(greatest, Code::kSigned ? size_bits(value) : bits_of(value));
  }
  CXL_OFFLOAD_VECTOR void end_reading() {
    const Scale made = Code::scale_of(greatest.greatest() & 0x7fffffff);
    *exponent = made.exponent;
    inverse = Vector::all(made.inverse());
    has_codes = made.has_codes();
  }
  CXL_OFFLOAD_VECTOR void write(size_t i, Words noise) const {
    Code::code(Vector::load(kept + i), inverse, noise).store(codes + i);
  }
  // When a block is all zeros, or has something that is not finite, its scale says so and the codes
  // are zero.
  CXL_OFFLOAD_VECTOR void end_writing() const {
    if (!has_codes) std::memset(codes, 0, kCodedElements);
  }

  Element* codes = nullptr;
  float* kept = nullptr;
  uint8_t* exponent = nullptr;
  Vector scale = Vector::all(0);
  Vector least = Vector::all(0);
  Vector inverse = Vector::all(0);
  Words greatest = Words::all(0);
  bool has_codes = false;
};

// A state of bfloat16, or one of float32, which is not rounded.
template <class T, bool kFirst>
struct NoisyState {
  using Element = T;

  CXL_OFFLOAD_VECTOR void begin(T* at, uint8_t*, float, float* room) {
    values = at;
    kept = room;
  }
  CXL_OFFLOAD_VECTOR Vector read(size_t i) const { return Vector::load(values + i); }
  CXL_OFFLOAD_VECTOR void keep(size_t i, Vector value) { value.store(kept + i); }
  static void end_reading() {}
  CXL_OFFLOAD_VECTOR void write(size_t i, Words noise) const {
    const Vector value = Vector::load(kept + i);
    if constexpr (std::is_same_v<T, Bf16>) {
      const Words bits = kFirst ? both(noise, Words::all(0xffff)) : down<16>(noise);
      store_noisy(value, bits, values + i);
    } else {
      value.store(values + i);
    }
  }
  static void end_writing() {}

  T* values = nullptr;
  float* kept = nullptr;
};
