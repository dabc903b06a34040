#include "base/check.h"
#include "kernels/grouped_matmul/grouped_matmul.h"

namespace jumar {
namespace {

int64_t At(const TensorView& list, int64_t i, int64_t j) {
  const int64_t at = i * list.stride[0] + (list.rank == 2 ? j * list.stride[1] : 0);
  return list.dtype == DType::kI32 ? list.ptr<const int32_t>()[at] : list.ptr<const int64_t>()[at];
}

}  // namespace

RowGroups ParseGroups(const char* op, const TensorView& list, int64_t type, int64_t rows) {
  JUMAR_CHECK(op, type >= 0 && type <= 2, "group_list_type must be 0, 1 or 2, but now is ", type);
  JUMAR_CHECK(op, list.dtype == DType::kI64 || list.dtype == DType::kI32, "group_list must be int64 or int32, got ",
              Describe(list));
  if (type == 2) {
    JUMAR_CHECK(op, list.rank == 2 && list.size[1] == 2, "group_list of type 2 must be [groups, 2], got ",
                ShapeString(list));
  } else {
    JUMAR_CHECK(op, list.rank == 1, "group_list of type ", type, " must be [groups], got ", ShapeString(list));
  }
  const int64_t count = list.size[0];
  RowGroups groups;
  groups.ranges.resize(static_cast<size_t>(count));
  std::vector<bool> named(static_cast<size_t>(count), false);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t value = At(list, i, 1);
    int64_t group = i;
    if (type == 2) {
      group = At(list, i, 0);
      JUMAR_CHECK(op, group >= 0 && group < count, "group_list names group ", group, " of ", count, " at entry ", i);
      JUMAR_CHECK(op, !named[static_cast<size_t>(group)], "group_list names group ", group, " twice, again at entry ",
                  i);
      named[static_cast<size_t>(group)] = true;
    }
    JUMAR_CHECK(op, value >= 0, "group_list[", i, "] should be larger than or equal to 0, got ", value);
    const int64_t begin = groups.used;
    int64_t end = value;
    if (type == 0) {
      JUMAR_CHECK(op, value >= begin,
                  "group_list of type 0 holds the ends of groups; its differences should be larger "
                  "than or equal to 0, got ",
                  begin, " followed by ", value, " at entry ", i);
    } else {
      JUMAR_CHECK(op, value <= rows - begin, "group_list adds up to more than the ", rows, " rows: group ", group,
                  " has ", value, " from row ", begin);
      end = begin + value;
    }
    JUMAR_CHECK(op, end <= rows, "group_list goes beyond the ", rows, " rows: group ", group, " ends at ", end);
    groups.ranges[static_cast<size_t>(group)] = {begin, end};
    groups.used = end;
  }
  return groups;
}

}  // namespace jumar
