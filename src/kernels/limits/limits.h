// What this machine can do at most, measured: the denominators of every "percent of peak".
#pragma once

namespace jumar {

// Multiply-add peak of `threads` threads in fp32 at the current SIMD level, in GFLOP/s (2 per multiply-add): register
// operands, as many independent chains as hide the latency. The best of several slices of about `seconds` in all.
double MeasureFmaGflops(int threads, double seconds = 0.2);

// The same for bf16 pairs accumulated in fp32: AMX tiles at level AVX3_SPR, VDPBF16PS at AVX3_ZEN4; 0 where the current
// level has neither.
double MeasureBf16Gflops(int threads, double seconds = 0.2);

// Copy bandwidth out of cache: bytes read plus bytes written, in GB/s (1e9). The better of plain and streaming stores.
// Needs `megabytes` for each of the two buffers, which should be several times the last-level cache share.
double MeasureCopyGBs(int threads, double seconds = 0.5, int megabytes = 256);

}  // namespace jumar
