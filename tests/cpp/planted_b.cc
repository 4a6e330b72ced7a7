// The other half: see planted_a.cc.
namespace cxl_offload {

enum class PlantedKind { kBig, kSmall, kNone };

struct Planted {
  double number;
  PlantedKind kind;
};

bool is_none(const Planted& planted) {
  return planted.number > 0 && planted.kind == PlantedKind::kNone;
}

}  // namespace cxl_offload
