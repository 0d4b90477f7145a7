#include "tessera/config/config.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tests/made_docs.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

Config parse(const std::string& text, const std::vector<std::string>& sets = {}) { return parse_config(text, "/base", sets, "run.toml"); }

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line: " << error.what();
    return error.what();
  }
  return "(nothing was refused)";
}

std::string refusal(const std::string& text, const std::vector<std::string>& sets = {}) {
  return refusal([&] { parse(text, sets); });
}

TEST(ConfigParse, ReadsEveryTypeOfField) {
  const auto config = parse(R"(
    [model]
    family = "llama"
    dim = 384
    kv_heads = 2
    tie_embeddings = true
    rope_theta = 500000
    [data]
    files = ["a.txt", "/data/b.txt"]
    [optim]
    betas = [0.9, 0.95]
    lr = 3e-4
    [mesh]
    dp_replicate = -1
    order = ["tp", "pp", "cp", "dp_shard", "dp_replicate"]
    [precision]
    loss_scale = 1024
  )");
  EXPECT_EQ(config.model.family, "llama");
  EXPECT_EQ(config.model.dim, 384);
  EXPECT_EQ(config.model.kv_heads, 2);
  EXPECT_FALSE(config.model.ffn_dim.has_value());
  EXPECT_TRUE(config.model.tie_embeddings);
  EXPECT_EQ(config.model.rope_theta, 500000.0) << "an integer is accepted for a number";
  EXPECT_EQ(config.data.files, (std::vector<std::string>{"/base/a.txt", "/data/b.txt"}));
  EXPECT_EQ(config.optim.betas, (Betas{0.9, 0.95}));
  EXPECT_EQ(config.optim.lr, 3e-4);
  EXPECT_EQ(config.mesh.dp_replicate, -1);
  EXPECT_EQ(config.mesh.order.front(), "tp");
  EXPECT_EQ(config.precision.loss_scale, "1024");
  EXPECT_TRUE(config.given.contains("model.rope_theta"));
  EXPECT_FALSE(config.given.contains("model.norm_eps"));
}

TEST(ConfigParse, EmptyFileHasTheDocumentedDefaults) {
  const auto config = parse("");
  EXPECT_EQ(config, Config());
  EXPECT_EQ(config.optim.betas, (Betas{0.9, 0.999}));
  EXPECT_EQ(config.optim.name, "adamw");
  EXPECT_EQ(config.optim.weight_decay, 0.01);
  EXPECT_EQ(config.batch.micro_size, 1);
  EXPECT_TRUE(config.data.shuffle);
  EXPECT_EQ(config.data.tokenizer, "byte");
  EXPECT_EQ(config.pipeline.split, std::vector<std::string>{"auto"});
  EXPECT_FALSE(config.mesh.dp_replicate.has_value());
}

TEST(ConfigParse, UnknownKeysNameTheNearest) {
  EXPECT_THAT(refusal("[optim]\nwieght_decay = 1"), AllOf(HasSubstr("optim.wieght_decay"), HasSubstr("optim.weight_decay"), HasSubstr("run.toml:2")));
  EXPECT_THAT(refusal("[modle]\ndim = 1"), AllOf(HasSubstr("[modle]"), HasSubstr("[model]")));
  EXPECT_THAT(refusal("[run]\nlr = 1"), HasSubstr("optim.lr")) << "the same key of another section";
  EXPECT_THAT(refusal("steps = 1"), AllOf(HasSubstr("steps"), HasSubstr("run.steps")));
  EXPECT_THAT(refusal("model = 3"), HasSubstr("expected a section [model]"));
  EXPECT_THAT(refusal("", {"optim.lrr=1"}), AllOf(HasSubstr("optim.lrr"), HasSubstr("optim.lr"), HasSubstr("--set")));
  EXPECT_THAT(refusal("", {"lr=1"}), HasSubstr("optim.lr"));
  EXPECT_THAT(refusal("", {"optin.lr=1"}), HasSubstr("optim.lr"));
  EXPECT_THAT(refusal("", {"optim.lr"}), HasSubstr("key=value"));
}

TEST(ConfigParse, WrongTypesNameKeyAndExpectedType) {
  EXPECT_THAT(refusal("[run]\nsteps = \"many\""), AllOf(HasSubstr("run.steps = \"many\""), HasSubstr("an integer"), HasSubstr("run.toml:2")));
  EXPECT_THAT(refusal("[run]\nsteps = 1.5"), AllOf(HasSubstr("run.steps = 1.5"), HasSubstr("an integer")));
  EXPECT_THAT(refusal("[optim]\nlr = true"), HasSubstr("a number"));
  EXPECT_THAT(refusal("[optim]\nlr = nan"), HasSubstr("a number"));
  EXPECT_THAT(refusal("[optim]\nbetas = [0.9]"), HasSubstr("a list of two numbers"));
  EXPECT_THAT(refusal("[optim]\nbetas = [0.9, \"x\"]"), HasSubstr("optim.betas = [0.9, \"x\"] ("));
  EXPECT_THAT(refusal("[optim]\nbetas = [0.9, \"x\"]"), HasSubstr("a list of two numbers"));
  EXPECT_THAT(refusal("[model]\ndim = 0.9"), HasSubstr("model.dim = 0.9 ("));
  EXPECT_THAT(refusal("[data]\nshuffle = 1"), HasSubstr("true or false"));
  EXPECT_THAT(refusal("[data]\nfiles = 3"), HasSubstr("a list of strings"));
  EXPECT_THAT(refusal("[data]\nfiles = [\"a\", 3]"), HasSubstr("a list of strings"));
  EXPECT_THAT(refusal("[data]\ntokenizer = 3"), HasSubstr("a string"));
  EXPECT_THAT(refusal("[mesh]\ntp = 3000000000"), HasSubstr("mesh.tp = 3000000000"));
  EXPECT_THAT(refusal("[model]\nkv_heads = \"x\""), AllOf(HasSubstr("model.kv_heads"), HasSubstr("an integer")));
  EXPECT_THAT(refusal("[model]\n[model.dim]\nx = 1"), AllOf(HasSubstr("model.dim = a table"), HasSubstr("an integer")));
}

TEST(ConfigParse, ChoicesAreListedWhenRefused) {
  EXPECT_THAT(refusal("[model]\nfamily = \"lama\""),
              AllOf(HasSubstr("model.family = \"lama\""), HasSubstr("one of llama, gpt2, mixtral, mlp;"), HasSubstr("did you mean llama")));
  EXPECT_THAT(refusal("[precision]\nloss_scale = \"often\""), AllOf(HasSubstr("a number"), HasSubstr("dynamic")));
  EXPECT_EQ(parse("[precision]\nloss_scale = \"dynamic\"").precision.loss_scale, "dynamic");
  EXPECT_EQ(parse("[precision]\nloss_scale = 0.5").precision.loss_scale, "0.5");
}

TEST(ConfigParse, KernelsAreChosenTogetherOrByName) {
  EXPECT_TRUE(parse("").run.kernels.is("auto"));
  EXPECT_TRUE(parse("", {"run.kernels=reference"}).run.kernels.is("reference"));
  const std::map<std::string, std::string> expected{{"*", "reference"}, {"attention", "auto"}};
  const Config one = parse("[run.kernels]\nattention = \"auto\"\n\"*\" = \"reference\"");
  EXPECT_EQ(one.run.kernels.by_pattern, expected);
  EXPECT_EQ(parse("", {"run.kernels={ attention = \"auto\", \"*\" = \"reference\" }"}), one);
  EXPECT_EQ(parse(to_toml(one)), one);
  EXPECT_EQ(parse("[run]\nkernels = { rope = \"reference\" }").run.kernels.everywhere, "auto") << "the rest";
  EXPECT_THAT(refusal("[run]\nkernels = { rope = \"refrence\" }"), AllOf(HasSubstr("run.kernels = \"refrence\""), HasSubstr("did you mean reference?")));
}

TEST(ConfigParse, SetSplitsAtTheFirstEqualsAndReadsToml) {
  const auto config = parse("[run]\nsteps = 5", {"run.steps=7", "optim.betas=[0.8, 0.9]", "data.shuffle=false", "comm.interface=a=b", " optim.lr =1e-3"});
  EXPECT_EQ(config.run.steps, 7);
  EXPECT_EQ(config.optim.betas, (Betas{0.8, 0.9}));
  EXPECT_FALSE(config.data.shuffle);
  EXPECT_EQ(config.comm.interface, "a=b");
  EXPECT_EQ(config.optim.lr, 1e-3);
}

TEST(ConfigParse, SetTakesBareStrings) {
  const auto config = parse("", {"pipeline.schedule=1f1b", "checkpoint.resume=latest", "model.family=gpt2", "optim.name=\"sgd\"", "comm.interface=127",
                                 "data.files=a.txt", "precision.loss_scale=2"});
  EXPECT_EQ(config.pipeline.schedule, "1f1b");
  EXPECT_EQ(config.checkpoint.resume, "latest");
  EXPECT_EQ(config.model.family, "gpt2");
  EXPECT_EQ(config.optim.name, "sgd") << "a TOML string loses its quotes";
  EXPECT_EQ(config.comm.interface, "127") << "a string field takes what TOML would read as a number";
  EXPECT_EQ(config.data.files, std::vector<std::string>{(fs::current_path() / "a.txt").string()});
  EXPECT_EQ(config.precision.loss_scale, "2");
  EXPECT_THAT(refusal("", {"run.steps=ten"}), AllOf(HasSubstr("run.steps"), HasSubstr("ten"), HasSubstr("an integer")));
  EXPECT_THAT(refusal("", {"run.steps=1\nrun.seed=2"}), HasSubstr("run.steps = \"1\\u000Arun.seed=2\"")) << "one key at a time";
  EXPECT_EQ(parse("", {"checkpoint.dir="}).checkpoint.dir, "");
  EXPECT_EQ(parse_config("[checkpoint]\nresume = \"\"\n[comm]\ntable = \"\"\n", "", {}).checkpoint.resume, "") << "of a file named without its folder";
}

/// What is saved in log.dir/config.toml can be read again, and messages do not end at a zero.
TEST(ConfigParse, TakesOnlyWhatCanBeSaved) {
  EXPECT_THAT(refusal("", {"data.files=caf\xe9.txt"}), AllOf(HasSubstr("--set data.files"), HasSubstr("not UTF-8")));
  EXPECT_EQ(parse("", {"comm.interface=caf\xc3\xa9"}).comm.interface, "caf\xc3\xa9");
  const Config unset;  // model.family is none of its choices yet
  EXPECT_EQ(parse(to_toml(unset)), unset);
  EXPECT_THAT(refusal("[model]\n\"di\\u0000m\" = 1"), AllOf(HasSubstr("\"di\\u0000m\""), HasSubstr(":2")));
  EXPECT_THAT(refusal("[\"mod\\u0000el\"]"), HasSubstr("\"mod\\u0000el\""));
  for (const char* const set :
       {"log.dir=\"l/a\\u0000b\"", "data.files=[\"a\\u0000b\"]", "comm.interface=\"a\\u0000b\"", "offload.activations={\"a\\u0000b\" = \"host\"}"}) {
    const std::string key = std::string(set).substr(0, std::string(set).find('='));
    EXPECT_THAT(refusal("", {set}), AllOf(HasSubstr(key + " = "), HasSubstr("a\\u0000b\" (--set): holds a zero"))) << set;
  }
}

TEST(ConfigParse, MessagesAreShort) {
  const std::string said = refusal("", {"run.steps=" + std::string(100000, 'x')});
  EXPECT_LT(said.size(), 400u);
  EXPECT_THAT(said, HasSubstr("... (100002 bytes) (--set): expected an integer"));
  EXPECT_THAT(refusal("", {"="}), HasSubstr("there is no key before the ="));
}

TEST(ConfigParse, PathsAreRelativeToWhereTheyStand) {
  const auto config =
      parse("[data]\ntokenizer = \"t.model\"\n[checkpoint]\nresume = \"latest\"\ndir = \"../ckpt\"\n[pipeline]\nschedule = \"mine.csv\"", {"log.dir=out"});
  EXPECT_EQ(config.data.tokenizer, "/base/t.model");
  EXPECT_EQ(config.checkpoint.dir, "/ckpt");
  EXPECT_EQ(config.checkpoint.resume, "latest");
  EXPECT_EQ(config.pipeline.schedule, "/base/mine.csv");
  EXPECT_EQ(config.log.dir, (fs::current_path() / "out").string());
  EXPECT_EQ(parse("", {"data.tokenizer=byte"}).data.tokenizer, "byte");
  EXPECT_EQ(parse("[pipeline]\nschedule = \"1F1B\"").pipeline.schedule, "1F1B") << "no name, and no path either";
}

TEST(ConfigParse, SyntaxErrorsSayWhere) {
  EXPECT_THAT(refusal("[run]\nsteps = = 3"), AllOf(HasSubstr("run.toml:2:"), HasSubstr("not valid TOML")));
  EXPECT_THAT(refusal("[run]\nsteps = 1\nsteps = 2"), HasSubstr("run.toml:3:"));
}

TEST(ConfigLoad, FileProblemsAreRefused) {
  const fs::path dir = fs::temp_directory_path() / "tessera_config_test";
  fs::create_directories(dir);
  EXPECT_THAT(refusal([&] { load_config(dir / "missing.toml"); }), AllOf(HasSubstr("missing.toml"), HasSubstr("no such file")));
  EXPECT_THAT(refusal([&] { load_config(dir); }), HasSubstr("is a folder"));
  std::ofstream(dir / "small.toml") << "[data]\nfiles = [\"text.txt\"]\n";
  auto config = load_config(dir / "small.toml", {"run.steps=3"});
  EXPECT_EQ(config.name, "small");
  EXPECT_EQ(config.data.files[0], (dir / "text.txt").string());
  resolve(config);
  EXPECT_EQ(config.log.dir, (fs::current_path() / "runs" / "small").string());
  fs::remove_all(dir);
}

TEST(ConfigWrite, SavedConfigurationLoadsBackEqual) {
  auto config = parse(R"(
    [model]
    family = "llama"
    dim = 64
    layers = 2
    heads = 4
    kv_heads = 2
    [data]
    files = ["a \"quoted\" name.txt", "back\\slash", "tab\there", "ünïcode"]
    seq_len = 16
    [optim]
    lr = 0.1
    betas = [0.30000000000000004, 1e-5]
    [mesh]
    dp_shard = 2
    [precision]
    loss_scale = 65536
  )");
  EXPECT_EQ(parse(to_toml(config)), config) << "with fields that are not set";
  resolve(config);
  const auto again = parse(to_toml(config));
  EXPECT_EQ(again, config);
  EXPECT_EQ(to_toml(again), to_toml(config));
  Config changed = config;
  changed.run.batch_coupled = "report";
  EXPECT_FALSE(changed == config);
}

TEST(ConfigWrite, ASettledValueIsSavedAsAskedWithWhatItBecame) {
  auto config = parse("[precision]\ncompute = \"auto\"");
  EXPECT_THAT(to_toml(config), HasSubstr("\ncompute = \"auto\"\n"));
  config.asked["precision.compute"] = std::exchange(config.precision.compute, "bf16");
  EXPECT_THAT(to_toml(config), HasSubstr("\ncompute = \"auto\"  # became \"bf16\"\n"));
  EXPECT_EQ(parse(to_toml(config)).precision.compute, "auto") << "another machine settles it anew";
  config.asked["precision.compute"] = "bf16";
  EXPECT_THAT(to_toml(config), HasSubstr("\ncompute = \"bf16\"\n")) << "asked for by name";
}

TEST(Settings, OfTheRecipesAllHaveAnEffect) {
  for (const auto& recipe : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/recipes")) {
    if (recipe.path().extension() == ".toml") EXPECT_THAT(settings_without_effect(load_config(recipe.path()), 1), ::testing::IsEmpty()) << recipe.path();
  }
}

TEST(ConfigWrite, KnowsWhatARunHasSaved) {
  const auto file = std::filesystem::temp_directory_path() / ("tessera_saved_" + std::to_string(getpid()) + ".toml");
  const auto is_saved = [&](const std::string& text) {
    std::ofstream(file) << text;
    return is_saved_config(file);
  };
  Config config = parse_config("[optim]\nlr = 1e-3\n[precision]\ncompute = \"bf16\"\n", "/");
  EXPECT_TRUE(is_saved(to_toml(config)));
  config.asked["precision.compute"] = "auto";
  EXPECT_TRUE(is_saved(to_toml(config)));
  EXPECT_FALSE(is_saved("# mine\n" + to_toml(config)));
  EXPECT_FALSE(is_saved("[optim]\nlr = 1e-3\n"));
  EXPECT_FALSE(is_saved("no configuration"));
  std::filesystem::remove(file);
}

TEST(ConfigDocs, CommittedFileIsUpToDate) { testing_support::expect_in_docs("configuration.md", configuration_markdown()); }

TEST(Nearest, FindsTheSmallestEditDistance) {
  const std::vector<std::string> known = {"steps", "seed", "threads"};
  EXPECT_EQ(nearest("step", known), "steps");
  EXPECT_EQ(nearest("sede", known), "seed") << "a swap is one edit";
  EXPECT_EQ(nearest("", known), "seed");
  EXPECT_EQ(nearest("x", {}), "");
}

TEST(SharedSettings, AreAllButPathsAndWhatIsOfOneHost) {
  const Config config;
  const Settings settings = shared_settings(config);
  std::set<std::string> shared;
  for (const auto& [key, value] : settings) shared.insert(key);
  std::set<std::string> own;
  Config::for_each_section(config, [&](const char* section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto&, const FieldRule&, std::string_view) {
      if (const auto key = detail::concat(section, ".", name); !shared.contains(key)) own.insert(key);
    });
  });
  EXPECT_EQ(own, (std::set<std::string>{"model.from_hf", "data.files", "data.validation_files", "data.tokenizer", "data.cache_dir", "comm.table",
                                        "comm.interface", "pipeline.schedule", "pipeline.costs_from", "checkpoint.dir", "checkpoint.resume", "log.dir",
                                        "log.record", "log.peak_tflops", "lora.from_peft", "offload.dir", "run.device", "run.memory_limit_bytes"}));
  EXPECT_THAT(settings, testing::Contains(std::pair<std::string, std::string>("run.threads", "unset")));
}

TEST(SettingsWithoutEffect, OnAModelThatIsOnlyRead) {
  const auto said = [](const std::vector<std::string>& sets) { return settings_without_effect_on_reading(parse("", sets), sets); };
  EXPECT_THAT(said({"model.rope_theta=5", "mesh.tp=2", "run.threads=1", " precision.compute =bf16", "data.tokenizer=byte"}), testing::IsEmpty());
  EXPECT_THAT(said({"mesh.pp=2", "pipeline.virtual_stages=2"}), testing::IsEmpty());
  EXPECT_THAT(said({"pipeline.virtual_stages=2"}), testing::IsEmpty());
  EXPECT_THAT(said({"pipeline.schedule=gpipe"}), testing::ElementsAre(HasSubstr("pipeline.schedule = gpipe: has no effect")));
  EXPECT_THAT(said({"optim.lr=0.5", "run.threads=2", "data.files=a", "comm.compression=bf16"}),
              testing::ElementsAre("optim.lr = 0.5: has no effect on a model that is only read", HasSubstr("data.files = a: "),
                                   HasSubstr("comm.compression = bf16: ")));
  const auto of_another = settings_without_effect_on_reading(parse("", {"run.seed=1"}), {"run.seed= 5"});
  EXPECT_THAT(of_another, testing::ElementsAre("run.seed = 5: has no effect on a model that is only read")) << "a checkpoint's seed stays in its place";
}

TEST(ConfigFile, NamesNoFolderAboveItsOwn) {
  const fs::path folder = fs::path(testing::TempDir()) / "tessera_config_names";
  fs::create_directories(folder);
  for (const auto& [file, name] : {std::pair("...toml", "run"), {"..toml", "run"}, {"a.b.toml", "a.b"}, {".toml", ".toml"}}) {
    std::ofstream(folder / file) << "[run]\nsteps = 3\n";
    EXPECT_EQ(load_config(folder / file).name, name);
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace tessera
