# Files that hold intrinsics of one instruction set: NAME_avx512bf16.cc and NAME_amx.cc. They run only after a CPU check.
# (g++ 12 reports its own _mm512_undefined_* as uninitialised.)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  file(GLOB JUMAR_AVX512BF16 CONFIGURE_DEPENDS src/kernels/*/*_avx512bf16.cc)
  file(GLOB JUMAR_AMX CONFIGURE_DEPENDS src/kernels/*/*_amx.cc)
  set_source_files_properties(${JUMAR_AVX512BF16} PROPERTIES COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512bf16;-mfma;-mf16c;-mavx2;-Wno-uninitialized;-Wno-maybe-uninitialized")
  set_source_files_properties(${JUMAR_AMX} PROPERTIES COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512bf16;-mamx-tile;-mamx-bf16;-mfma;-mf16c;-mavx2;-Wno-uninitialized;-Wno-maybe-uninitialized")
endif()
