#include "tessera/train/ranks_agree.h"

#include <atomic>

#include <gmock/gmock.h>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/meeting/disagreement.h"
#include "tessera/core/error.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using comm::disagreement;
using testing::AllOf;
using testing::HasSubstr;

TEST(RanksAgree, NamesTheSettingItsValuesAndWhoHasThem) {
  const Settings most{{"model.dim", "32"}, {"optim.lr", "0.003"}, {"run.seed", "1"}}, odd{{"model.dim", "32"}, {"optim.lr", "0.3"}, {"run.seed", "2"}};
  EXPECT_EQ(disagreement({most, most, most}), std::nullopt);
  EXPECT_EQ(disagreement({most}), std::nullopt);
  EXPECT_EQ(disagreement({most, most, most, odd}),
            "optim.lr = 0.003 on ranks 0-2, 0.3 on rank 3: all ranks of a run need the same (as of run.seed, which differ too); start each with the same "
            "recipe, flags and texts");
  EXPECT_EQ(disagreement({{{"a", "1"}}, {{"a", "1"}, {"--dump-step", "4"}}}),
            "--dump-step = not given on rank 0, 4 on rank 1: all ranks of a run need the same; start each with the same recipe, flags and texts");
}

TEST(RanksAgree, AllRanksRefuse) {
  for (const int size : {1, 2, 3, 5}) {
    std::atomic<int> refused = 0;
    comm::run_ranks(size, [&](comm::World& world) {
      EXPECT_NO_THROW(check_ranks_agree(world.group(), {{"optim.lr", "0.1"}}));
      try {
        check_ranks_agree(world.group(), {{"optim.lr", world.rank() + 1 == world.size() ? "0.3" : "0.1"}});
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("optim.lr = 0.1 on rank"), HasSubstr(detail::concat("0.3 on rank ", size - 1))));
        ++refused;
      }
    });
    EXPECT_EQ(refused, size == 1 ? 0 : size);
  }
}

class RunSettings : public testing_support::TrainFixture {
 protected:
  Settings settings(const std::string& text, const std::vector<std::string>& sets = {}) const {
    std::filesystem::create_directories(folder_ / text);
    std::ofstream(folder_ / text / "text.txt") << std::string(600, 'a') << text.back() << std::string(600, 'b');
    const Config read = config("llama", [&] {
      auto all = sets;
      all.push_back("data.files=" + (folder_ / text / "text.txt").string());
      return all;
    }());
    return run_settings(read, open_inputs(read), comm::world_options(read.comm));
  }
};

TEST_F(RunSettings, TellTextsByWhatTheyHoldAndNotByWhereTheyLie) {
  const Settings here = settings("one/x");
  EXPECT_EQ(disagreement({here, settings("elsewhere/x", {"log.dir=/other", "comm.interface=eth1", "run.memory_limit_bytes=9"})}), std::nullopt);
  EXPECT_THAT(disagreement({here, settings("one/y")}).value_or(""), HasSubstr("data.files = content "));
  EXPECT_THAT(disagreement({here, settings("one/x", {"data.validation_files=" + (folder_ / "text.txt").string()})}).value_or(""),
              HasSubstr("data.validation_files = none on rank 0, content "));
  const auto file = [&](const char* name, const char* text) {
    std::ofstream(folder_ / name) << text;
    return std::vector<std::string>{"mesh.pp=2", "pipeline.schedule=" + (folder_ / name).string()};
  };
  const Settings by_file = settings("one/x", file("a.csv", "0F0,0B0\n1F0,1B0\n"));
  EXPECT_EQ(disagreement({by_file, settings("one/x", file("b.csv", "0F0,,0B0\n1F0,1B0\n"))}), std::nullopt);
  EXPECT_THAT(disagreement({by_file, settings("one/x", file("c.csv", "0F0,0I0,0W0\n1F0,1B0\n"))}).value_or(""), HasSubstr("pipeline.schedule = content "));
  const auto alone = [&](const char* name, const char* stages, const char* text) {
    auto sets = file(name, text);
    sets.insert(sets.end(), {"mesh.pp=1", std::string("pipeline.virtual_stages=") + stages});
    return settings("one/x", sets);
  };
  const Settings of_two = alone("d.csv", "2", "0F0,1F0,1B0,0B0\n");
  EXPECT_EQ(disagreement({of_two, alone("e.csv", "2", "0F0,1F0,,1B0,0B0\n")}), std::nullopt) << "stages of one rank";
  EXPECT_THAT(disagreement({of_two, alone("f.csv", "2", "0F0,1F0,1I0,0B0,1W0\n")}).value_or(""), HasSubstr("pipeline.schedule = content "));
  EXPECT_EQ(disagreement({alone("g.csv", "1", "0F0,0B0\n"), alone("h.csv", "1", "0F0,0I0,0W0\n")}), std::nullopt) << "which nobody reads";
  EXPECT_THAT(disagreement({here, settings("one/x", {"pipeline.schedule=gpipe"})}).value_or(""), HasSubstr("pipeline.schedule = 1f1b on rank 0, gpipe"));
  EXPECT_THAT(disagreement({here, settings("one/x", {"optim.lr=0.3"})}).value_or(""), HasSubstr("optim.lr = 0.01 on rank 0, 0.3 on rank 1"));
}

/// By a run that goes on, too, where its checkpoint may lack what they hold.
TEST_F(RunSettings, TellStartingFilesByWhatTheyHoldWhereTheyAreRead) {
  const auto of = [&](const char* adapter, const char* partial, bool resumed) {
    std::filesystem::create_directories(folder_ / adapter);
    checkpoint::SafetensorsWriter file(folder_ / adapter / "adapter_model.safetensors", {{"w", at::kFloat, {2}}});
    file.write(at::full({2}, static_cast<double>(adapter[0])));
    file.finish();
    Config read = config("llama", {"lora.modules=layers.*.attention.*", std::string("checkpoint.partial=") + partial});
    Inputs inputs = open_inputs(read);
    if (resumed) inputs.resume.emplace();
    read.lora.from_peft = (folder_ / adapter).string();
    return run_settings(read, inputs, comm::world_options(read.comm));
  };
  const char* const some = "[\"**.lora_*\"]";
  EXPECT_THAT(disagreement({of("a", "[]", false), of("b", "[]", false)}).value_or(""), HasSubstr("lora.from_peft = content "));
  EXPECT_EQ(disagreement({of("a", "[]", true), of("b", "[]", true)}), std::nullopt) << "which nobody reads";
  EXPECT_THAT(disagreement({of("a", some, true), of("b", some, true)}).value_or(""), HasSubstr("lora.from_peft = content "));
}

TEST_F(RunSettings, TellWhetherThereAreCheckpointsAndNotWhereTheyLie) {
  const Settings saving = settings("x", {"checkpoint.dir=" + (folder_ / "one").string()});
  EXPECT_EQ(disagreement({saving, settings("x", {"checkpoint.dir=" + (folder_ / "two").string()})}), std::nullopt);
  EXPECT_THAT(disagreement({settings("x"), saving}).value_or(""), HasSubstr("checkpoint.dir = not set on rank 0, set on rank 1"));
  const Settings going_on = settings("x", {"checkpoint.dir=" + (folder_ / "one").string(), "checkpoint.resume=latest"});
  EXPECT_THAT(disagreement({saving, going_on}).value_or(""), HasSubstr("checkpoint.resume = not set on rank 0, set on rank 1"));
}

}  // namespace
}  // namespace tessera
