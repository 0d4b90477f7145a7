#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/inspect_text.h"

namespace tessera::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

json slice(const std::string& file, const json& offset, const json& size) {
  return {{"file", file}, {"key", "k"}, {"boxes", {{{"offset", offset}, {"size", size}}}}, {"hash", "0"}};
}

json checkpoint() {
  const std::string first = "rank-00000-of-00002.safetensors", second = "rank-00001-of-00002.safetensors",
                    name = "layers.0.a_path_of_more_than_forty_eight_letters.weight";
  const json halves{slice(first, {0, 0}, {1, 4}), slice(second, {1, 0}, {1, 4})};
  json tensors = json::array();
  for (const std::string prefix : {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}) {
    tensors.push_back({{"name", prefix + name}, {"kind", prefix.empty() ? "parameter" : "state"}, {"dtype", "F32"}, {"shape", {2, 4}}, {"slices", halves}});
  }
  tensors.push_back({{"name", "n"}, {"kind", "parameter"}, {"dtype", "BF16"}, {"shape", {3}}, {"slices", json::array({slice(second, {0}, {3})})}});
  return {{"kind", "checkpoint"}, {"step", 7},        {"valid", true}, {"problem", ""},         {"files", {{first, 1024}, {second, 2048}}},
          {"tensors", tensors},   {"parameters", 11}, {"ranks", 2},    {"layout", "dp_shard 2"}};
}

TEST(InspectText, SumsUpACheckpoint) {
  EXPECT_EQ(found_text(checkpoint(), false),
            "kind              checkpoint\n"
            "step              7\n"
            "valid             true\n"
            "parameters        11\n"
            "ranks             2\n"
            "layout            dp_shard 2\n"
            "\n"
            "holds                 dtype  tensors  bytes\n"
            "optimizer.exp_avg     F32          1   32 B\n"
            "optimizer.exp_avg_sq  F32          1   32 B\n"
            "parameters            BF16         1    6 B\n"
            "parameters            F32          1   32 B\n"
            "\n"
            "file                                bytes\n"
            "rank-00000-of-00002.safetensors  1.00 KiB\n"
            "rank-00001-of-00002.safetensors  2.00 KiB\n"
            "2 files                          3.00 KiB\n"
            "\n"
            "--tensors lists each tensor\n");
}

TEST(InspectText, ListsTensorsInColumnsAsWideAsTheyNeed) {
  const std::string text = found_text(checkpoint(), true);
  EXPECT_THAT(text, HasSubstr("layers.0.a_path_of_more_than_forty_eight_letters.weight                       F32   [2, 4]\n"
                              "    [1, 4] at [0, 0] in rank-00000-of-00002.safetensors\n"
                              "    [1, 4] at [1, 0] in rank-00001-of-00002.safetensors\n"
                              "optimizer.exp_avg.layers.0"));
  EXPECT_THAT(text,
              HasSubstr("\nn                                                                             BF16  [3]     rank-00001-of-00002.safetensors\n"));
}

TEST(InspectText, OfManyFilesSaysTheSum) {
  json found = checkpoint();
  for (int rank = 0; rank < 40; ++rank) found["files"]["another-" + std::to_string(rank)] = 1024;
  const std::string text = found_text(found, false);
  EXPECT_THAT(text, HasSubstr("42 files  43.0 KiB\n"));
  EXPECT_THAT(text, Not(HasSubstr("another-7")));
}

TEST(InspectText, SumsUpAFile) {
  const json found{{"kind", "safetensors"},
                   {"bytes", 2048},
                   {"metadata", {{"format", "pt"}}},
                   {"tensors",
                    {{{"name", "a"}, {"dtype", "F16"}, {"shape", {512}}, {"offset", 0}, {"bytes", 1024}},
                     {{"name", "b"}, {"dtype", "F16"}, {"shape", {256}}, {"offset", 1024}, {"bytes", 512}}}}};
  EXPECT_EQ(found_text(found, true),
            "kind              safetensors\n"
            "bytes             2048 (2.00 KiB)\n"
            "\n"
            "holds    dtype  tensors     bytes\n"
            "tensors  F16          2  1.50 KiB\n"
            "\n"
            "a  F16  [512]\n"
            "b  F16  [256]\n");
}

TEST(InspectText, LeavesOutWhatIsSaidOfNoDevice) {
  json found{{"devices", {{{"name", "cpu"}, {"cores", 2}, {"memory_bytes", 1024}, {"bf16", true}, {"kernels", true}}}},
             {"auto", "cpu"},
             {"torch", "2.13.0"},
             {"cuda", {{"torch", false}, {"build", false}}},
             {"engines", {"shm", "gloo"}}};
  EXPECT_EQ(devices_text(found),
            "device  model      memory  bf16  kernels\n"
            "cpu     2 cores  1.00 KiB  yes   yes\n"
            "torch 2.13.0, without CUDA; this build has no kernels for it\n"
            "engines: shm, gloo\n"
            "run.device = auto: cpu\n");
  for (const char* name : {"cuda:0", "cuda:1"}) {
    found["devices"].push_back({{"name", name}, {"model", "H"}, {"memory_bytes", 2048}, {"free_bytes", 1024}, {"bf16", nullptr}, {"kernels", false}});
  }
  found["devices"][1]["peers"] = {"cuda:1"};
  EXPECT_THAT(devices_text(found), HasSubstr("device  model      memory      free  bf16  kernels  reaches\n"
                                             "cpu     2 cores  1.00 KiB            yes   yes\n"
                                             "cuda:0  H        2.00 KiB  1.00 KiB  ?     no       cuda:1\n"));
}

}  // namespace
}  // namespace tessera::cli
