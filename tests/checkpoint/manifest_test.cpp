#include "tessera/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/json_file.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

Manifest example_manifest() {
  Manifest manifest;
  manifest.step = 7;
  manifest.files = {{"a.safetensors", 100}};
  manifest.tensors["w"] = {"F32", {4, 2}, {{"a.safetensors", "w", {{{0, 0}, {1, 2}}, {{3, 0}, {1, 2}}}, "0123456789abcdef"}}};
  manifest.progress = {{"lr", 0.1}};
  return manifest;
}

/// The text of a manifest with one field changed, and a hash that fits: what an attacker would write, not what a bad disk does.
std::string forged(const std::function<void(nlohmann::json&)>& change) {
  auto json = nlohmann::json::parse(to_json(example_manifest()));
  json.erase("manifest_hash");
  change(json);
  std::string body = json.dump();
  body.pop_back();
  return body + ",\n\"manifest_hash\": \"" + hash_hex(body.data(), body.size()) + "\"\n}\n";
}

TEST(Manifest, ComesBackFromItsText) {
  const Manifest manifest = example_manifest(), read = parse_manifest(to_json(manifest), "m");
  EXPECT_EQ(to_json(read), to_json(manifest));
  EXPECT_EQ(read.slices("w").at(0).boxes, manifest.tensors.at("w").slices.at(0).boxes);
  EXPECT_EQ(read.slices("w").at(0).local_shape(), (std::vector<int64_t>{2, 2}));
}

TEST(Manifest, RefusesWhatDoesNotAddUp) {
  const auto expect_refused = [](const std::function<void(nlohmann::json&)>& change, const std::string& reason) {
    EXPECT_THAT([&] { parse_manifest(forged(change), "dir/manifest.json"); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("dir/manifest.json"), HasSubstr(reason))));
  };
  const auto slice = [](nlohmann::json& json) -> nlohmann::json& { return json["tensors"]["w"]["slices"][0]; };
  parse_manifest(forged([](auto&) {}), "m");
  expect_refused([](auto& json) { json["format"] = "other"; }, "no manifest");
  expect_refused([](auto& json) { json["version"] = 99; }, "version 99");
  expect_refused([](auto& json) { json.erase("step"); }, "step");
  expect_refused([](auto& json) { json["step"] = "x"; }, "\"x\" is not an integer");
  expect_refused([](auto& json) { json["step"] = 1e30; }, "not an integer");
  expect_refused([](auto& json) { json["files"]["a.safetensors"] = 18446744073709551615u; }, "not an integer");
  expect_refused([](auto& json) { json["files"]["a.safetensors"] = -1; }, "size of -1");
  expect_refused([](auto& json) { json["files"]["../secret"] = 1; }, "leaves the checkpoint's folder");
  expect_refused([](auto& json) { json["files"][".."] = 1; }, "leaves the checkpoint's folder");
  expect_refused([](auto& json) { json["tensors"]["w"]["dtype"] = "F31"; }, "F31");
  expect_refused([](auto& json) { json["tensors"]["w"]["shape"] = {4611686018427387904, 4}; }, "impossible shape");
  expect_refused([&](auto& json) { slice(json)["file"] = "b.safetensors"; }, "not listed");
  expect_refused([&](auto& json) { slice(json)["boxes"][0] = {{0, 1}, {1, 2}}; }, "leaves the tensor's shape");
  expect_refused([&](auto& json) { slice(json)["boxes"][0] = {{9223372036854775807, 0}, {1, 2}}; }, "leaves the tensor's shape");
  expect_refused([&](auto& json) { slice(json)["boxes"][0] = {{0}, {1}}; }, "leaves the tensor's shape");
  expect_refused([&](auto& json) { slice(json)["boxes"][0] = {{3, 0}, {1, 2}}; }, "w");  // overlaps the other box
  expect_refused(
      [](auto& json) {
        nlohmann::json deep;
        for (int i = 0; i < 1000; ++i) deep = nlohmann::json::array({std::move(deep)});
        json["progress"] = std::move(deep);
      },
      "nested deeper");
}

TEST(Manifest, RefusesTextThatIsNone) {
  for (const std::string text : {"", "{}", "not json at all, but long enough to carry a hash line at its very end"}) {
    EXPECT_THAT([&] { parse_manifest(text, "m"); }, ThrowsMessage<ConfigError>(HasSubstr("m: "))) << text;
  }
}

TEST(JsonFile, NamesTheOffsetOfTheFirstError) {
  EXPECT_THAT([] { parse_json("{\"a\": ]", "f.json"); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("f.json"), HasSubstr("offset 7"))));
  EXPECT_THAT([] { parse_json("[1e999]", "f.json"); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("f.json"), HasSubstr("1e999"))));
}

}  // namespace
}  // namespace tessera::checkpoint
