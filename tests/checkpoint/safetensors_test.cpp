#include "tessera/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tessera/core/error.h"
#include "tests/checkpoint/files.h"
#include "tests/file_limit.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// A file as its bytes: a header of this text, then `data_bytes` bytes.
std::string raw_file(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i));
  return bytes + header + std::string(data_bytes, '\1');
}

void expect_refused(const TemporaryFolder& folder, const std::string& bytes, const std::string& reason) {
  const auto file = folder / "bad.safetensors";
  write_all(file, bytes);
  EXPECT_THAT([&] { SafetensorsFile{file}; }, ThrowsMessage<ConfigError>(AllOf(HasSubstr(file.string()), HasSubstr(reason)))) << bytes.substr(0, 200);
}

void expect_header_refused(const TemporaryFolder& folder, const std::string& header, const std::string& reason, size_t data_bytes = 8) {
  expect_refused(folder, raw_file(header, data_bytes), reason);
}

TEST(Safetensors, GivesBackEveryDtypeAndShape) {
  const TemporaryFolder folder;
  std::vector<at::Tensor> tensors;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool,
                           at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {1}, {3, 5}, {0}, {2, 0, 3}, {7}}) {
      tensors.push_back(at::randn(shape).mul(3).abs().to(dtype));
    }
  }
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < tensors.size(); ++i) specs.push_back({"t/" + std::to_string(i) + " \"é", tensors[i].scalar_type(), tensors[i].sizes().vec()});
  SafetensorsWriter writer(folder / "all.safetensors", specs, {{"format", "pt"}, {"note", "a\nb"}});
  for (const auto& tensor : tensors) writer.write(tensor);
  const uint64_t bytes = writer.finish();
  EXPECT_EQ(bytes, std::filesystem::file_size(folder / "all.safetensors"));

  const SafetensorsFile file(folder / "all.safetensors");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"note", "a\nb"}}));
  EXPECT_EQ(file.entries().size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto read = file.tensor(specs[i].name);
    EXPECT_EQ(read.scalar_type(), tensors[i].scalar_type());
    EXPECT_EQ(read.sizes(), tensors[i].sizes());
    const auto raw = file.bytes(specs[i].name);
    EXPECT_EQ(raw.size(), tensors[i].nbytes());
    EXPECT_TRUE(raw.empty() || std::memcmp(raw.data(), tensors[i].const_data_ptr(), raw.size()) == 0);
    EXPECT_TRUE(raw.empty() || std::memcmp(read.const_data_ptr(), raw.data(), raw.size()) == 0);
  }
}

TEST(Safetensors, WritesAnyStridesAndNoTensorAtAll) {
  const TemporaryFolder folder;
  const auto tensor = at::arange(12).view({3, 4}).t();
  SafetensorsWriter writer(folder / "t.safetensors", {{"t", at::kLong, {4, 3}}});
  writer.write(tensor);
  writer.finish();
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "t.safetensors").tensor("t"), tensor));
  SafetensorsWriter(folder / "none.safetensors", {}).finish();
  EXPECT_TRUE(SafetensorsFile(folder / "none.safetensors").entries().empty());
}

/// Readers that map a file take tensors from where they lie.
TEST(Safetensors, DataBeginsAtAMultipleOfEightBytes) {
  const TemporaryFolder folder;
  for (size_t length = 1; length <= 9; ++length) {
    const std::string name(length, 'a');
    SafetensorsWriter writer(folder / "t.safetensors", {{name, at::kDouble, {2}}});
    writer.write(at::ones({2}, at::kDouble));
    writer.finish();
    const SafetensorsFile file(folder / "t.safetensors");
    EXPECT_EQ(file.entries().at(name).offset % 8, 0) << length;
    EXPECT_TRUE(at::equal(file.tensor(name), at::ones({2}, at::kDouble)));
  }
}

TEST(Safetensors, TensorsOutliveTheFileObject) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "t.safetensors", {{"t", at::kFloat, {1000}}});
  writer.write(at::ones({1000}));
  writer.finish();
  const auto tensor = SafetensorsFile(folder / "t.safetensors").tensor("t");
  std::filesystem::remove(folder / "t.safetensors");
  EXPECT_EQ(tensor.sum().item<float>(), 1000);
}

TEST(Safetensors, AnUnfinishedFileNeverHasItsName) {
  const TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder / "t.safetensors", {{"a", at::kFloat, {2}}, {"b", at::kFloat, {2}}});
    writer.write(at::ones({2}));
    EXPECT_THROW(writer.finish(), InternalError);
    EXPECT_THROW(writer.write(at::ones({3})), InternalError);
  }
  for (const rlim_t room : {8, 100}) {  // not even the header, or not all of the tensor
    const FileLimit full(room);
    const auto write = [&] { SafetensorsWriter(folder / "t.safetensors", {{"a", at::kFloat, {1000}}}).write(at::ones({1000})); };
    EXPECT_THAT(write, ThrowsMessage<Error>(HasSubstr("File too large"))) << room;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_THAT([&] { SafetensorsWriter(folder / "nowhere/t.safetensors", {}); }, ThrowsMessage<Error>(AllOf(HasSubstr("nowhere"), HasSubstr("No such file"))));
}

TEST(Safetensors, SaysWhatIsNotThere) {
  const TemporaryFolder folder;
  SafetensorsWriter(folder / "t.safetensors", {}).finish();
  EXPECT_THAT([&] { SafetensorsFile(folder / "t.safetensors").tensor("w"); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("t.safetensors"), HasSubstr("'w'"))));
  EXPECT_THAT([&] { SafetensorsFile(folder / "missing"); }, ThrowsMessage<ConfigError>(HasSubstr("No such file")));
  EXPECT_THAT([&] { SafetensorsFile(folder.path()); }, ThrowsMessage<ConfigError>(HasSubstr("not a regular file")));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT([&] { SafetensorsFile(folder / "pipe"); }, ThrowsMessage<ConfigError>(HasSubstr("not a regular file")));
}

TEST(Safetensors, RefusesFilesThatAreNoneNamingTheOffset) {
  const TemporaryFolder folder;
  expect_refused(folder, "", "0 bytes");
  expect_refused(folder, "1234567", "7 bytes");
  expect_refused(folder, std::string(8, '\xff'), "offset 0");
  expect_refused(folder, "[model]\ndim = 32\n", "is no safetensors file");
  expect_refused(folder, std::string("\x10\0\0\0\0\0\0\0{}", 10), "offset 0 gives a header of 16 bytes, the file has 10");
  expect_header_refused(folder, "", "offset 8");
  expect_header_refused(folder, "{\"a\": }", "not JSON, at offset 14");
  expect_header_refused(folder, "{} {}", "not JSON");
  expect_header_refused(folder, "\xff\xfe", "not JSON");
  expect_header_refused(folder, "[]", "list");
  expect_header_refused(folder, "3", "number");
  expect_header_refused(folder, "null", "null");
}

TEST(Safetensors, RefusesHeadersThatTheFormatDoesNotAllow) {
  const TemporaryFolder folder;
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  expect_header_refused(folder, R"({"a":[]})", "list");
  expect_header_refused(folder, R"({"a":{}})", "lacks");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[2]}})", "lacks");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "two fields 'dtype'");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", "two fields 'shape'");
  expect_header_refused(folder, R"({"a":{"extra":1,)" + good + "}}", "unknown field 'extra'");
  expect_header_refused(folder, R"({"a":{)" + good + R"(},"a":{)" + good + "}}", "two tensors named 'a'");
  expect_header_refused(folder, R"({"__metadata__":{"k":1}})", "number");
  expect_header_refused(folder, R"({"__metadata__":{"k":{}}})", "object");
  expect_header_refused(folder, R"({"__metadata__":{},"__metadata__":{}})", "two __metadata__");
  expect_header_refused(folder, R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", "F31");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "negative");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "fraction");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", "list");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,8]}})", "boolean");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})", "string");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}})", "not two numbers");
  expect_header_refused(folder, R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", "63 bits");
}

TEST(Safetensors, RefusesRangesThatDoNotAddUp) {
  const TemporaryFolder folder;
  const auto entry = [](const std::string& name, const std::string& shape, const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  expect_header_refused(folder, "{" + entry("a", "[2]", "[0,4]") + "}", "shape say otherwise");
  expect_header_refused(folder, "{" + entry("a", "[2]", "[8,0]") + "}", "lies at offsets");
  expect_header_refused(folder, "{" + entry("a", "[2]", "[8,16]") + "}", "lies at offsets");
  expect_header_refused(folder, "{" + entry("a", "[4]", "[0,16]") + "}", "lies at offsets");
  // Products that wrap around to the size at hand, with and without a zero that would hide them.
  expect_header_refused(folder, "{" + entry("a", "[4611686018427387904,4]", "[0,0]") + "}", "shape say otherwise");
  expect_header_refused(folder, "{" + entry("a", "[4611686018427387904,4611686018427387904,0]", "[0,0]") + "}", "shape say otherwise");
  expect_header_refused(folder, "{" + entry("a", "[2]", "[0,8]") + "," + entry("b", "[2]", "[4,12]") + "}", "overlaps", 12);
  expect_header_refused(folder, "{" + entry("a", "[2]", "[0,8]") + "," + entry("b", "[2]", "[0,8]") + "}", "overlaps");
  expect_header_refused(folder, "{" + entry("a", "[1]", "[0,4]") + "," + entry("b", "[1]", "[8,12]") + "}", "no tensor holds the bytes", 12);
  expect_header_refused(folder, "{" + entry("a", "[1]", "[0,4]") + "}", "the file at");
}

TEST(Safetensors, ADeepOrEndlessHeaderCostsNoMoreThanItsText) {
  const TemporaryFolder folder;
  expect_header_refused(folder, std::string(1 << 20, '['), "list");
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested += "{\"a\":";
  expect_header_refused(folder, nested, "unknown field 'a'");
}

TEST(Safetensors, SurvivesEveryFlippedByteAndEveryTruncation) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "t.safetensors", {{"a", at::kFloat, {3}}, {"b", at::kByte, {5}}}, {{"k", "v"}});
  writer.write(at::ones({3}));
  writer.write(at::ones({5}, at::kByte));
  writer.finish();
  const std::string good = read_all(folder / "t.safetensors");
  const auto try_open = [&](const std::string& bytes) {
    write_all(folder / "changed", bytes);
    try {
      const SafetensorsFile file(folder / "changed");
      for (const auto& [name, entry] : file.entries()) EXPECT_EQ(file.tensor(name).nbytes(), entry.bytes);
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  };
  for (size_t length = 0; length < good.size(); length += 3) EXPECT_FALSE(try_open(good.substr(0, length))) << length;
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bytes = good;
    bytes[i] ^= i % 2 == 0 ? 1 : 64;
    try_open(bytes);
  }
}

TEST(Safetensors, ReadsTensorsThatAreNotAligned) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "t.safetensors", {{"a", at::kByte, {3}}, {"b", at::kFloat, {2}}});
  writer.write(at::ones({3}, at::kByte));
  writer.write(at::full({2}, 2.5f));
  writer.finish();
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "t.safetensors").tensor("b"), at::full({2}, 2.5f)));
}

}  // namespace
}  // namespace tessera::checkpoint
