// Which SIMD level kernels run at: Highway's choice for its targets, plus two x86 levels of our own for the GEMM.
#include <cstdlib>

#include "base/check.h"
#include "base/simd_dispatch.h"
#include "hwy/highway.h"
#include "hwy/targets.h"
#include "jumar/runtime.h"

#if HWY_ARCH_X86
#include <asm/prctl.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jumar {
namespace {

constexpr const char* kZen4 = "AVX3_ZEN4";
constexpr const char* kSpr = "AVX3_SPR";

#if HWY_ARCH_X86
bool CpuHasAvx512Bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && ((a >> 5) & 1) != 0;
}

// AMX needs the CPU's tiles and the kernel's permission to use their state (Linux: arch_prctl ARCH_REQ_XCOMP_PERM).
bool CpuHasAmxBf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if (((d >> 22) & 1) == 0 || ((d >> 24) & 1) == 0) return false;
  constexpr int kReqXcompPerm = 0x1023;
  constexpr int kXTileData = 18;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXTileData) == 0;
}
#endif

struct Level {
  std::string name;
  int64_t hwy_target;
};

// Best first.
std::vector<Level> DetectLevels() {
  std::vector<Level> levels;
#if HWY_ARCH_X86
  const bool avx3 = (hwy::SupportedTargets() & HWY_TARGETS & HWY_AVX3) != 0;
  if (avx3 && CpuHasAvx512Bf16()) {
    if (CpuHasAmxBf16()) levels.push_back({kSpr, HWY_AVX3});
    levels.push_back({kZen4, HWY_AVX3});
  }
#endif
  // Lower bits are better targets.
  for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    levels.push_back({hwy::TargetName(target), target});
  }
  return levels;
}

struct State {
  std::vector<Level> levels = DetectLevels();
  size_t cap = 0;

  void Cap(size_t index) {
    cap = index;
    int64_t allowed = 0;
    for (size_t i = index; i < levels.size(); ++i) allowed |= levels[i].hwy_target;
    hwy::SetSupportedTargetsForTest(allowed);
    hwy::GetChosenTarget().Update(allowed);
  }

  size_t Find(const char* who, const std::string& name) const {
    std::string known;
    for (size_t i = 0; i < levels.size(); ++i) {
      if (levels[i].name == name) return i;
      known += (i == 0 ? "" : ", ") + levels[i].name;
    }
    Fail(who, "unknown or unusable SIMD target \"", name, "\"; usable here: ", known);
  }

  State() {
    const char* env = std::getenv("JUMAR_SIMD");
    Cap(env == nullptr || *env == '\0' ? 0 : Find("JUMAR_SIMD", env));
  }
};

State& GetState() {
  static State state;
  return state;
}

}  // namespace

void InitSimd() { GetState(); }

std::vector<std::string> SimdTargets() {
  std::vector<std::string> names;
  for (const Level& level : GetState().levels) names.push_back(level.name);
  return names;
}

std::string SimdTarget() {
  const State& state = GetState();
  return state.levels[state.cap].name;
}

void SetSimdTarget(const std::string& name) {
  State& state = GetState();
  state.Cap(name.empty() ? 0 : state.Find("SetSimdTarget", name));
}

bool SimdAllows(const std::string& name) {
  const State& state = GetState();
  for (size_t i = state.cap; i < state.levels.size(); ++i) {
    if (state.levels[i].name == name) return true;
  }
  return false;
}

}  // namespace jumar
