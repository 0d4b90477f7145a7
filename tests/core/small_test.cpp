#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <system_error>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/hash.h"
#include "tessera/core/host_read.h"
#include "tessera/core/log.h"
#include "tessera/core/log_plot.h"
#include "tessera/core/poll.h"
#include "tessera/core/svg.h"
#include "tessera/core/system_reason.h"
#include "tessera/core/temporary_place.h"
#include "tests/file_limit.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Format, Bytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(640 * 1024), "640 KiB");
  EXPECT_EQ(format_bytes(1024 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(int64_t{1602} << 20), "1.56 GiB");
  EXPECT_EQ(format_bytes(-2048), "-2.00 KiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<int64_t>::max()), "8.00 EiB");
}

TEST(Format, OneLineShowsWhatATerminalWouldObey) {
  EXPECT_EQ(one_line("a\nb\tc"), "a b\tc");
  EXPECT_EQ(one_line("\x1b[31mred\x07\x7f"), "\\x1b[31mred\\x07\\x7f");
  EXPECT_EQ(one_line("\xc2\x9b"
                     "2J na\xc3\xafve \xc2\xa7"),
            "\\x9b"
            "2J na\xc3\xafve \xc2\xa7");
}

TEST(Format, CountAndDuration) {
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1240), "1.24 K");
  EXPECT_EQ(format_count(35.1e6), "35.1 M");
  EXPECT_EQ(format_count(405e9), "405 B");
  EXPECT_EQ(format_count(999999), "1.00 M");
  EXPECT_EQ(format_duration(0), "0 ns");
  EXPECT_EQ(format_duration(85e-6), "85 us");
  EXPECT_EQ(format_duration(1.2), "1.20 s");
  EXPECT_EQ(format_duration(185), "3 m 05 s");
  EXPECT_EQ(format_duration(59.7), "1 m 00 s");
  EXPECT_EQ(format_duration(3599.9), "1 h 00 m");
  EXPECT_EQ(format_duration(2 * 3600 + 240), "2 h 04 m");
  EXPECT_EQ(format_duration(5 * 86400), "5 d 00 h");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "a long time");
}

TEST(Format, FloatsAreShortestRoundTrip) {
  EXPECT_EQ(format_float(0.1), "0.1");
  EXPECT_EQ(format_float(3), "3.0");
  EXPECT_EQ(format_float(-0.0), "-0.0");
  EXPECT_EQ(format_float(1e-5), "1e-05");
  EXPECT_EQ(format_float(1e300), "1e+300");
  EXPECT_EQ(format_float(std::nan("")), "nan");
  EXPECT_EQ(format_float(-INFINITY), "-inf");
  for (const double value : {0.1 + 0.2, 1.0 / 3, 5e-324, 1.7976931348623157e308}) EXPECT_EQ(std::strtod(format_float(value).c_str(), nullptr), value);
}

TEST(SystemReason, NamesTheLimitBehindAnError) {
  const auto thread = std::make_error_code(std::errc::resource_unavailable_try_again);
  EXPECT_THAT(reason_of(std::system_error(thread)), AllOf(HasSubstr("no more threads or processes can be started"), HasSubstr("ulimit -u")));
  EXPECT_THAT(reason_of(std::system_error(EPERM, std::system_category(), "a timer")), HasSubstr("a timer: Operation not permitted"));
  EXPECT_EQ(reason_of_writing(ENOSPC), "No space left on device");
  EXPECT_EQ(reason_of_writing(EFBIG), "File too large (ulimit -f)");
  EXPECT_EQ(reason_of_writing(EMFILE), "Too many open files (ulimit -n)");
}

/// No room is nothing that was asked for wrongly: the command ends with 1, and a launcher starts the rank again.
TEST(SystemReason, OnlyAFullDiskIsNoErrorOfTheConfiguration) {
  const auto said = [](int code) -> std::string {
    try {
      fail_to_write("a.bin: cannot be written", code, "choose another output");
    } catch (const ConfigError& error) {
      return std::string("asked wrongly: ") + error.what();
    } catch (const Error& error) {
      return error.what();
    }
  };
  for (const int code : {ENOSPC, EDQUOT, EFBIG}) {
    EXPECT_EQ(said(code), "a.bin: cannot be written: " + reason_of_writing(code) + "; make room there, or choose another output");
  }
  EXPECT_EQ(said(EACCES), "asked wrongly: a.bin: cannot be written: Permission denied; choose another output");
}

TEST(Hash, DoesNotDependOnTheSplit) {
  std::string text(100000, 'x');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31);
  Hasher pieces;
  pieces.update(text.data(), 1).update(text.data() + 1, 0).update(text.data() + 1, 70000).update(text.data() + 70001, text.size() - 70001);
  EXPECT_EQ(pieces.value(), hash_bytes(text.data(), text.size()));
  EXPECT_EQ(pieces.hex(), hash_hex(text.data(), text.size()));
  text[50000] ^= 1;
  EXPECT_NE(pieces.value(), hash_bytes(text.data(), text.size()));
  EXPECT_EQ(to_hex(0xabc), "0000000000000abc");
  EXPECT_EQ(hash_hex("", 0), "2d06800538d394c2") << "XXH3 of nothing, as published";
}

TEST(HostRead, AnswersForMetaTensors) {
  EXPECT_EQ(host_read(at::full({1}, 2.5), 9), 2.5);
  EXPECT_EQ(host_read(at::full({}, 7, at::kLong), 9), 7);
  EXPECT_EQ(host_read(at::empty({}, at::kMeta), 9), 9);
  EXPECT_THROW(host_read(at::empty({2}, at::kMeta), 9), InternalError);
  EXPECT_THROW(host_read(at::Tensor(), 9), InternalError);
  EXPECT_EQ(host_read_all(at::arange(4).view({2, 2}).t(), 9), (std::vector<double>{0, 2, 1, 3}));
  EXPECT_EQ(host_read_all(at::empty({2}, at::kMeta), 9), (std::vector<double>{9, 9}));
  EXPECT_TRUE(host_read_all(at::empty({0}), 9).empty());
  EXPECT_THROW(host_read_all(at::Tensor(), 9), InternalError);
}

TEST(AttachmentTest, DetachesOnceInReverseOrder) {
  std::vector<int> undone;
  const auto note = [&](int i) { return Attachment([&undone, i] { undone.push_back(i); }); };
  {
    Attachment first = note(1);
    first.add(note(2));
    Attachment moved = std::move(first);
    EXPECT_TRUE(first.empty());  // NOLINT: the moved-from state is specified
    EXPECT_TRUE(undone.empty());
  }
  EXPECT_EQ(undone, (std::vector<int>{2, 1}));
  Attachment replaced = note(3);
  replaced = note(4);
  EXPECT_EQ(undone.back(), 3);
  replaced.detach();
  replaced.detach();
  EXPECT_EQ(undone, (std::vector<int>{2, 1, 3, 4}));
  note(5).release();
  EXPECT_EQ(undone.size(), 4u);
  Attachment().detach();
}

TEST(SvgTest, EscapesTextAndSaves) {
  Svg picture(200, 100);
  picture.rect(1, 2, 3.14159, 4, Svg::color(0), "a < b").line(0, 0, 10, 10).polyline({{0, 0}, {1, 2}}, "red").text(5, 5, "x & \"y\"");
  const auto text = picture.str();
  EXPECT_THAT(text, HasSubstr("a &lt; b"));
  EXPECT_THAT(text, HasSubstr("x &amp; &quot;y&quot;"));
  EXPECT_THAT(text, HasSubstr("width=\"3.14\""));
  EXPECT_THAT(text, HasSubstr("points=\"0,0 1,2\""));
  EXPECT_THAT(text, Not(HasSubstr("<b")));
  const auto path = std::filesystem::temp_directory_path() / "tessera_svg_test.svg";
  picture.save(path.string());
  EXPECT_EQ(std::filesystem::file_size(path), text.size());
  std::filesystem::remove(path);
  const auto refusal = [&](const std::string& file) -> std::string {
    try {
      picture.save(file);
    } catch (const ConfigError& error) {
      return std::string("asked wrongly: ") + error.what();
    } catch (const Error& error) {
      return error.what();
    }
    return "(written)";
  };
  const auto below = (path / "below" / "a.svg").string();
  EXPECT_EQ(refusal(below),
            "asked wrongly: picture " + below + ": cannot be written: No such file or directory; name a file in a folder that exists and can be written");
  EXPECT_EQ(refusal("/dev/full"), "picture /dev/full: cannot be written: No space left on device; make room there, or name a file on another disk");
  EXPECT_TRUE(std::filesystem::exists("/dev/full"));
  const std::string cut = [&] {
    const FileLimit full(10);
    return refusal(path.string());
  }();
  EXPECT_EQ(cut, "picture " + path.string() + ": cannot be written: File too large (ulimit -f); make room there, or name a file on another disk");
  EXPECT_FALSE(std::filesystem::exists(path)) << "half a picture is none";
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(LogPlotTest, ALineThatLiesOnOthersLeavesThemToBeSeen) {
  const auto drawn = [](const std::vector<LogPlot::Points>& lines) {
    Svg svg(LogPlot::width, LogPlot::height);
    const LogPlot::Axis axis{.base = 2, .values = {1, 16}, .label = [](double) { return std::string(); }};
    LogPlot plot(svg, 0, 0, "", axis, axis);
    for (size_t style = 0; style < lines.size(); ++style) plot.series(lines[style], style);
    return svg.str();
  };
  const LogPlot::Points line{{1, 2}, {4, 4}, {16, 16}}, parts{{1, 2}, {4, 4}, {16, 8}}, other{{1, 3}, {4, 5}, {16, 16}};
  const std::string apart = drawn({line, other});
  EXPECT_EQ(count_of(apart, "<polyline"), 2U) << "a common point is no common line";
  EXPECT_EQ(count_of(apart, "width=\"6\""), 5U);
  EXPECT_EQ(count_of(apart, "width=\"3.6\""), 1U) << "the second marker on one point";
  const auto dashed = [&](const std::string& text, size_t style, const std::string& dashes) {
    return count_of(text, "stroke=\"" + std::string(Svg::color(style)) + "\" stroke-width=\"2\" stroke-dasharray=\"" + dashes + "\"");
  };
  EXPECT_EQ(count_of(apart, "dasharray"), 0U);
  const std::string same = drawn({line, line, line});
  EXPECT_EQ(count_of(same, "<polyline"), 3U);
  EXPECT_EQ(count_of(same, "dasharray"), 2U);
  EXPECT_EQ(dashed(same, 1, "10 10"), 1U);
  EXPECT_EQ(dashed(same, 2, "5 15"), 1U);
  const std::string beside = drawn({line, {{1, 2.01}, {4, 4.02}, {16, 15.9}}});
  EXPECT_EQ(dashed(beside, 1, "10 10"), 1U) << "within a line's width";
  const std::string partly = drawn({line, parts});
  EXPECT_EQ(count_of(partly, "<polyline"), 3U) << "the second goes on alone";
  EXPECT_EQ(dashed(partly, 1, "10 10"), 1U);
}

TEST(LogPlotTest, SaysWhatItsAxesCount) {
  Svg svg(LogPlot::width, LogPlot::height);
  const auto label = [](double) { return std::string("tick"); };
  LogPlot(svg, 0, 0, "title", {.values = {1, 10}, .label = label, .name = "ranks"}, {.values = {1, 10}, .label = label, .name = "bytes & more"});
  EXPECT_THAT(svg.str(), HasSubstr(">ranks</text>"));
  EXPECT_THAT(svg.str(), HasSubstr(">bytes &amp; more</text>"));
}

TEST(TemporaryPlace, SaysWhichVariableNamedIt) {
  const char* const names[] = {"TMPDIR", "TMP", "TEMP", "TEMPDIR"};
  std::vector<std::pair<const char*, std::string>> before;
  for (const char* const name : names) {
    if (const char* const value = std::getenv(name)) before.emplace_back(name, value);
    unsetenv(name);
  }
  EXPECT_EQ(temporary_place().folder, "/tmp");
  setenv("TEMP", "/other", 1);
  setenv("TMPDIR", "", 1);
  EXPECT_EQ(temporary_place().knob, "TEMP = /other");
  setenv("TMPDIR", "nope", 1);
  EXPECT_EQ(temporary_place().knob, "TMPDIR = nope");
  EXPECT_EQ(temporary_place().folder, std::filesystem::current_path() / "nope");
  EXPECT_THAT([] { temporary_place().refuse("Not a directory", "do without"); },
              ::testing::ThrowsMessage<ConfigError>("TMPDIR = nope: nothing can be made there (Not a directory); set TMPDIR to a folder that exists and can be "
                                                    "written, or do without"));
  for (const char* const name : names) unsetenv(name);
  for (const auto& [name, value] : before) setenv(name, value.c_str(), 1);
}

TEST(Poll, SaysOnceWhatItWaitsForWhereThatTakesLong) {
  const auto waits = [](int ms, int asked) {
    ::testing::internal::CaptureStderr();
    const bool done = poll_until(std::chrono::milliseconds(ms), [&] { return --asked == 0; }, [] { return std::string("it is held"); });
    return std::pair(done, ::testing::internal::GetCapturedStderr());
  };
  EXPECT_EQ(waits(0, 1), std::pair(true, std::string()));
  EXPECT_EQ(waits(0, 2), std::pair(false, std::string()));
  EXPECT_EQ(waits(1000, 3), std::pair(true, std::string()));
  const auto [done, said] = waits(2200, 1000);
  EXPECT_FALSE(done);
  EXPECT_THAT(said, HasSubstr("W it is held; waiting up to 2.20 s for its end\n"));
  EXPECT_EQ(said.find("held"), said.rfind("held"));
}

TEST(Log, GoesToStandardError) {
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  log().warn("careful {}", 1);
  log().info("plain");
  const std::string err = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(err, HasSubstr("W careful 1\n"));
  EXPECT_THAT(err, HasSubstr("I plain\n"));
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
}

}  // namespace
}  // namespace tessera
