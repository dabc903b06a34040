#include <cstdio>

#include "gtest/gtest.h"
#include "jumar/runtime.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::printf("SIMD targets:");
  for (const std::string& target : jumar::SimdTargets()) std::printf(" %s", target.c_str());
  std::printf("\n");
  return RUN_ALL_TESTS();
}
