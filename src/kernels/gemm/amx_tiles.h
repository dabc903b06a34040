// The tile registers of AMX. Include it in files compiled for AMX only; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jumar {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// What was stored there, and elsewhere, is in memory: g++ does not see all that instructions on tiles read.
inline void Stored(const void* at) { asm volatile("" ::"r"(at) : "memory"); }

// The tile state of this thread; closed when it has multiplied, so that it costs nothing in a context switch.
inline void OpenRegisters() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  Stored(&config);
  _tile_loadconfig(&config);
}
inline void CloseRegisters() { _tile_release(); }

class Tiles {
 public:
  Tiles() { OpenRegisters(); }
  ~Tiles() { CloseRegisters(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace jumar
