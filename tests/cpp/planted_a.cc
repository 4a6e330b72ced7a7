// Half of a pair of types of one name: `make -C tests/cpp odr` must find it.
namespace cxl_offload {

enum class PlantedKind { kOne, kOther };

struct Planted {
  int number;
  PlantedKind kind;
};

bool is_other(const Planted& planted) {
  return planted.number > 0 && planted.kind == PlantedKind::kOther;
}

}  // namespace cxl_offload
