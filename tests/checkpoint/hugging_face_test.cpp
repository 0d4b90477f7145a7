#include "tessera/checkpoint/hugging_face.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/dump.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/models/model.h"
#include "tests/checkpoint/hugging_face_files.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

Config config_for(const std::filesystem::path& dir) {
  Config config;
  config.model.from_hf = dir.string();
  return config;
}

ModelConfig read_config(const TemporaryFolder& folder, const nlohmann::json& json, const std::function<void(Config&)>& change = {}) {
  write_all(folder / "config.json", json.dump());
  Config config = config_for(folder.path());
  if (change) change(config);
  return read_hugging_face_config(config);
}

/// Every parameter of a model as zeros, whole.
std::vector<SlicedTensor> targets_for(const ModelConfig& model) {
  std::vector<SlicedTensor> targets;
  for (const auto& parameter : nn::unique_parameters(*make_model(model))) {
    targets.push_back({at::zeros_like(parameter.tensor), Slice::whole(parameter.name, parameter.tensor.sizes().vec())});
  }
  return targets;
}

at::Tensor find(const std::vector<SlicedTensor>& tensors, const std::string& name) {
  for (const auto& each : tensors) {
    if (each.slice.name == name) return each.tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    EXPECT_TRUE(at::equal(actual.at(name), tensor)) << name;
  }
  EXPECT_EQ(actual.size(), expected.size());
}

TEST(HuggingFaceConfigFile, ReadsLlamaOfTransformers4And5) {
  const TemporaryFolder folder;
  auto json = llama_config();
  const auto check = [](const ModelConfig& model) {
    EXPECT_EQ(model.family, "llama");
    EXPECT_EQ(model.dim, 8);
    EXPECT_EQ(model.layers, 2);
    EXPECT_EQ(model.heads, 4);
    EXPECT_EQ(model.kv_heads, 2);
    EXPECT_EQ(model.ffn_dim, 12);
    EXPECT_EQ(model.vocab_size, 11);
    EXPECT_EQ(model.max_seq_len, 16);
    EXPECT_EQ(model.rope_theta, 5000);
    EXPECT_EQ(model.norm_eps, 1e-6);
    EXPECT_FALSE(model.tie_embeddings);
  };
  check(read_config(folder, json));
  json.erase("rope_theta");
  json.erase("rope_scaling");
  json.erase("torch_dtype");
  json["dtype"] = "float32";
  json["head_dim"] = 2;
  json["rope_parameters"] = {{"rope_theta", 5000.0}, {"rope_type", "default"}};
  check(read_config(folder, json));
  json.erase("num_key_value_heads");
  EXPECT_EQ(read_config(folder, json).kv_heads, 4);
  json["tie_word_embeddings"] = true;
  EXPECT_TRUE(read_config(folder, json).tie_embeddings);
  json.erase("max_position_embeddings");
  EXPECT_EQ(read_config(folder, json).max_seq_len, 2048) << "what their class takes for it";
  EXPECT_EQ(read_config(folder, json, [](Config& config) { config.model.max_seq_len = 99; }).max_seq_len, 99);
}

TEST(HuggingFaceConfigFile, TakesOtherNamesOfAnActivationAndKeysThatAreNone) {
  const TemporaryFolder folder;
  auto llama = llama_config(), gpt2 = gpt2_config();
  llama["hidden_act"] = "swish";
  llama["partial_rotary_factor"] = nullptr;
  llama["attention_bias"] = nullptr;
  EXPECT_EQ(read_config(folder, llama).dim, 8);
  gpt2["activation_function"] = "gelu_pytorch_tanh";
  EXPECT_EQ(read_config(folder, gpt2).dim, 6);
}

TEST(HuggingFaceConfigFile, ReadsGpt2) {
  const TemporaryFolder folder;
  const ModelConfig model = read_config(folder, gpt2_config());
  EXPECT_EQ(model.family, "gpt2");
  EXPECT_EQ(model.dim, 6);
  EXPECT_EQ(model.heads, 3);
  EXPECT_EQ(model.kv_heads, 3);
  EXPECT_EQ(model.ffn_dim, 24);
  EXPECT_EQ(model.max_seq_len, 10);
  EXPECT_TRUE(model.tie_embeddings);
  EXPECT_EQ(model.dropout, 0);
  auto json = gpt2_config();
  json["n_inner"] = 9;
  EXPECT_EQ(read_config(folder, json).ffn_dim, 9);
  json.erase("n_head");
  json["num_attention_heads"] = 2;
  EXPECT_EQ(read_config(folder, json).heads, 2) << "another name of theirs for it";
}

nlohmann::json mistral_config() {
  auto json = llama_config();
  json["architectures"] = {"MistralForCausalLM"};
  json["model_type"] = "mistral";
  json["sliding_window"] = 5;
  return json;
}

TEST(HuggingFaceConfigFile, ReadsMistralsWindow) {
  const TemporaryFolder folder;
  auto json = mistral_config();
  const ModelConfig model = read_config(folder, json);
  EXPECT_EQ(model.family, "llama");
  EXPECT_EQ(model.sliding_window, 5);
  EXPECT_EQ(model.kv_heads, 2);
  json["sliding_window"] = nullptr;
  EXPECT_EQ(read_config(folder, json).sliding_window, 0) << "as from their second version on";
  json.erase("sliding_window");
  EXPECT_EQ(read_config(folder, json).sliding_window, 4096) << "what their class takes for it";
  json.erase("max_position_embeddings");
  EXPECT_EQ(read_config(folder, json).max_seq_len, 131072) << "theirs";
  json["num_attention_heads"] = 8;
  json.erase("num_key_value_heads");
  EXPECT_EQ(read_config(folder, json).kv_heads, 8) << "theirs, too";
  json["use_sliding_window"] = false;
  json["sliding_window"] = 7;
  EXPECT_EQ(read_config(folder, json).sliding_window, 7) << "their class does not look at the other key";
  json.erase("use_sliding_window");
  json["layer_types"] = {"sliding_attention", "sliding_attention"};
  EXPECT_EQ(read_config(folder, json).sliding_window, 7);
  EXPECT_THAT(
      [&] {
        read_config(folder, json, [](Config& config) {
          config.model.sliding_window = 8;
          config.given.insert("model.sliding_window");
        });
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("model.sliding_window = 8"), HasSubstr("says 7"))));
}

TEST(HuggingFaceConfigFile, RefusesByName) {
  const TemporaryFolder folder;
  const auto expect_refused = [&](nlohmann::json json, const std::string& key, const nlohmann::json& value, const std::string& reason) {
    json[key] = value;
    EXPECT_THAT([&] { read_config(folder, json); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("config.json"), HasSubstr(reason)))) << key << value;
  };
  expect_refused(llama_config(), "architectures", {"MambaForCausalLM"}, "MambaForCausalLM");
  expect_refused(llama_config(), "rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, "llama3");
  expect_refused(llama_config(), "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "linear");
  expect_refused(llama_config(), "rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 1.0}}, "yarn");
  expect_refused(llama_config(), "rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}, "partial");
  expect_refused(llama_config(), "rope_parameters", 3, "rope_parameters = 3");
  expect_refused(llama_config(), "attention_bias", true, "attention_bias = true");
  expect_refused(llama_config(), "rope_parameters", {{"rope_type", "default"}, {"rope_theta", 7.0}}, "rope_theta = 5000 contradicts rope_parameters");
  expect_refused(llama_config(), "model_type", "mistral", "model_type = \"mistral\" contradicts architectures");
  expect_refused(gpt2_config(), "model_type", "llama", "its model_type is \"gpt2\"");
  for (const auto& config : {llama_config(), gpt2_config()}) {
    expect_refused(config, "sliding_window", 4, "sliding_window = 4");
    expect_refused(config, "partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5");
    expect_refused(config, "is_causal", false, "is_causal = false");
    expect_refused(config, "is_causal", nullptr, "is_causal = null");  // transformers takes it for false
    expect_refused(config, "quantization_config", {{"bits", 4}}, "quantization_config = {\"bits\":4}");
    expect_refused(config, "per_layer_config", {{"0", {{"intermediate_size", 6}}}}, "per_layer_config = {\"0\":{\"intermediate_size\":6}}");
    expect_refused(config, "transformers_weights", "weights.bin", "transformers_weights = \"weights.bin\"");
    expect_refused(config, "transformers_weights", "../other.safetensors", "transformers_weights = \"../other.safetensors\"");
  }
  expect_refused(llama_config(), "sliding_window", 4, "MistralForCausalLM");
  expect_refused(mistral_config(), "sliding_window", 0, "sliding_window = 0");
  expect_refused(mistral_config(), "layer_types", {"sliding_attention", "full_attention"}, "layer_types");
  expect_refused(mistral_config(), "layer_types", {"full_attention", "full_attention"}, "set sliding_window to null");
  expect_refused(gpt2_config(), "num_attention_heads", 1, "n_head = 3 contradicts num_attention_heads = 1");
  expect_refused(llama_config(), "hidden_act", "gelu", "hidden_act = \"gelu\"");
  expect_refused(llama_config(), "head_dim", 4, "head_dim = 4");
  expect_refused(llama_config(), "hidden_size", "8", "hidden_size = \"8\"");
  expect_refused(llama_config(), "hidden_size", -8, "hidden_size = -8");
  expect_refused(llama_config(), "num_hidden_layers", 1000000000, "num_hidden_layers");
  expect_refused(llama_config(), "hidden_size", 8.5, "hidden_size = 8.5");
  expect_refused(llama_config(), "hidden_size", nullptr, "hidden_size is missing");
  expect_refused(llama_config(), "vocab_size", 5'000'000'000, "vocab_size");
  expect_refused(gpt2_config(), "activation_function", "relu", "activation_function = \"relu\"");
  expect_refused(gpt2_config(), "scale_attn_weights", nullptr, "scale_attn_weights = null");
  expect_refused(gpt2_config(), "tie_word_embeddings", nullptr, "tie_word_embeddings = null");
  expect_refused(gpt2_config(), "scale_attn_by_inverse_layer_idx", true, "scale_attn_by_inverse_layer_idx");
  write_all(folder / "config.json", "[1]");
  EXPECT_THAT([&] { read_hugging_face_config(config_for(folder.path())); }, ThrowsMessage<ConfigError>(HasSubstr("not a JSON object")));
  const auto gone = AllOf(HasSubstr("model.from_hf = "), HasSubstr("nowhere: there is no such folder"), HasSubstr("--set model.from_hf=DIR"));
  EXPECT_THAT([&] { read_hugging_face_config(config_for(folder / "nowhere")); }, ThrowsMessage<ConfigError>(gone));
  EXPECT_THAT([&] { hugging_face_fingerprint(folder / "nowhere"); }, ThrowsMessage<ConfigError>(gone)) << "of a checkpoint that names it";
}

/// As transformers 5.24 and 4.57 read it: theirs is the class's own theta there.
TEST(HuggingFaceConfigFile, AThetaThatRopeScalingHidesIsAContradiction) {
  const TemporaryFolder folder;
  auto json = llama_config();
  json.erase("rope_theta");
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 900.0}};
  json["rope_scaling"] = {{"rope_type", "default"}};
  EXPECT_THAT([&] { read_config(folder, json); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("rope_theta of rope_parameters contradicts rope_scaling = {\"rope_type\":\"default\"}"),
                                               HasSubstr("write rope_theta beside the two"))));
  json["rope_theta"] = 900.0;
  EXPECT_EQ(read_config(folder, json).rope_theta, 900) << "which both versions take then";
  json.erase("rope_theta");
  json["rope_scaling"]["rope_theta"] = 900.0;
  EXPECT_EQ(read_config(folder, json).rope_theta, 900);
  for (const nlohmann::json& none : {nlohmann::json(), nlohmann::json::object()}) {
    json["rope_scaling"] = none;
    EXPECT_EQ(read_config(folder, json).rope_theta, 900) << "it says nothing";
  }
}

/// AutoModel of transformers, with PEFT installed, gives the sum of both.
TEST(HuggingFaceConfigFile, AnAdapterBesideTheWeightsHasToBeAskedFor) {
  const TemporaryFolder folder;
  write_all(folder / "adapter_config.json", "{}");
  const auto beside = [&](const std::string& modules, const std::filesystem::path& from) {
    return [=](Config& config) {
      config.lora.modules = modules;
      config.lora.from_peft = from.string();
    };
  };
  const auto refused =
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("model.from_hf = "), HasSubstr("adapter_config.json"), HasSubstr("set lora.from_peft to this folder")));
  EXPECT_THAT([&] { read_config(folder, llama_config()); }, refused);
  EXPECT_THAT([&] { read_config(folder, llama_config(), beside("layers.*.attention.*", folder / "another")); }, refused);
  EXPECT_THAT([&] { read_config(folder, llama_config(), beside("", folder.path())); }, refused) << "without modules it is not read";
  EXPECT_EQ(read_config(folder, llama_config(), beside("layers.*.attention.*", folder / ".")).dim, 8);
}

TEST(HuggingFaceConfigFile, KeysThatAreSetMustAgree) {
  const TemporaryFolder folder;
  const auto set = [](const std::string& key, const std::function<void(ModelConfig&)>& change) {
    return [=](Config& config) {
      change(config.model);
      config.given.insert("model." + key);
    };
  };
  EXPECT_EQ(read_config(folder, llama_config(), set("dim", [](auto& model) { model.dim = 8; })).dim, 8);
  EXPECT_THAT([&] { read_config(folder, llama_config(), set("dim", [](auto& model) { model.dim = 16; })); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("model.dim = 16"), HasSubstr("says 8"))));
  EXPECT_THAT([&] { read_config(folder, llama_config(), set("kv_heads", [](auto& model) { model.kv_heads = 4; })); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("model.kv_heads = 4"), HasSubstr("says 2"))));
  EXPECT_THROW(read_config(folder, llama_config(), set("family", [](auto& model) { model.family = "gpt2"; })), ConfigError);
  const auto beside = read_config(folder, llama_config(), [](Config& config) {
    config.model.max_seq_len = 99;
    config.model.dropout = 0.25;
    config.given = {"model.max_seq_len", "model.dropout"};
  });
  EXPECT_EQ(beside.max_seq_len, 99);
  EXPECT_EQ(beside.dropout, 0.25);
  EXPECT_THAT([&] { read_config(folder, gpt2_config(), set("max_seq_len", [](auto& model) { model.max_seq_len = 11; })); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("model.max_seq_len = 11"), HasSubstr("10"))));
}

/// A folder in which files are written anew for each question.
class HuggingFaceTokenizer : public testing::Test {
 protected:
  HuggingFaceFrame frame(const nlohmann::json& config, const std::string& tokenizer = "") const {
    std::filesystem::remove(folder_ / "tokenizer.json");
    write_all(folder_ / "tokenizer_config.json", config.dump());
    if (!tokenizer.empty()) write_all(folder_ / "tokenizer.json", tokenizer);
    return hugging_face_frame(folder_.path());
  }
  bool adds(const nlohmann::json& config) const { return frame(config).bos; }
  /// As transformers 5 saves it.
  static std::string processor(const std::string& single, const std::string& ids = "[1]") {
    return R"({"post_processor": {"type": "TemplateProcessing", "single": [)" + single + R"(], "special_tokens": {"<s>": {"id": "<s>", "ids": )" + ids +
           R"(}, "</s>": {"id": "</s>", "ids": [2]}}}})";
  }
  const TemporaryFolder folder_;
  const std::string bos_ = R"({"SpecialToken": {"id": "<s>", "type_id": 0}})", eos_ = R"({"SpecialToken": {"id": "</s>", "type_id": 0}})",
                    text_ = R"({"Sequence": {"id": "A", "type_id": 0}})";
};

TEST_F(HuggingFaceTokenizer, SaysWhetherATextHasABeginning) {
  EXPECT_EQ(hugging_face_tokenizer(folder_.path()), std::nullopt);
  EXPECT_FALSE(hugging_face_frame(folder_.path()).bos) << "nothing is said";
  EXPECT_THAT(hugging_face_frame(folder_.path()).remarks, testing::IsEmpty());
  write_all(folder_ / "tokenizer.model", "pieces");
  EXPECT_EQ(hugging_face_tokenizer(folder_.path()), folder_ / "tokenizer.model");
  EXPECT_TRUE(adds({{"add_bos_token", true}, {"tokenizer_class", "Unheard"}}));
  EXPECT_FALSE(adds({{"add_bos_token", false}, {"tokenizer_class", "LlamaTokenizer"}}));
  EXPECT_TRUE(adds({{"tokenizer_class", "LlamaTokenizer"}})) << "as that class does by itself";
  EXPECT_FALSE(adds({{"add_bos_token", nullptr}, {"tokenizer_class", "LlamaTokenizerFast"}})) << "which takes null for false";
  EXPECT_FALSE(adds({{"tokenizer_class", "GPT2Tokenizer"}}));
  EXPECT_FALSE(adds(nlohmann::json::object()));
  EXPECT_THAT([&] { adds({{"add_bos_token", "yes"}}); }, ThrowsMessage<ConfigError>(HasSubstr("tokenizer_config.json: add_bos_token = \"yes\"")));
  EXPECT_THAT(frame({{"tokenizer_class", "LlamaTokenizer"}}).remarks,
              testing::ElementsAre(HasSubstr("as LlamaTokenizer of transformers 4 does, and that of 5")));
  EXPECT_THAT(frame(nlohmann::json::object()).remarks, testing::ElementsAre(HasSubstr("neither add_bos_token nor tokenizer_class")));
}

/// transformers 5 writes no add_bos_token.
TEST_F(HuggingFaceTokenizer, ThePostProcessorSaysHowATextBegins) {
  using testing::ElementsAre;
  using testing::IsEmpty;
  const nlohmann::json mistral{{"tokenizer_class", "TokenizersBackend"}, {"bos_token", "<s>"}}, llama{{"tokenizer_class", "LlamaTokenizer"}};
  const std::string begun = processor(bos_ + "," + text_), plain = processor(text_);
  const HuggingFaceFrame front = frame(mistral, begun);
  EXPECT_TRUE(front.bos);
  EXPECT_EQ(front.bos_token.text, "<s>");
  EXPECT_EQ(front.bos_token.id, 1);
  EXPECT_EQ(front.file, folder_ / "tokenizer.json");
  EXPECT_FALSE(front.eos);
  EXPECT_THAT(front.remarks, IsEmpty());
  EXPECT_TRUE(frame(mistral, R"({"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, )" +
                                 nlohmann::json::parse(begun).at("post_processor").dump() + "]}}")
                  .bos);
  const HuggingFaceFrame behind = frame(mistral, processor(text_ + "," + eos_));
  EXPECT_TRUE(behind.eos);
  EXPECT_EQ(behind.eos_token.text, "</s>");
  EXPECT_EQ(behind.eos_token.id, 2);
  EXPECT_EQ(frame(mistral, processor(bos_ + "," + eos_ + "," + text_)).bos_token.text, "<s> </s>");
  EXPECT_EQ(frame(mistral, processor(bos_ + "," + eos_ + "," + text_)).bos_token.id, std::nullopt);
  std::filesystem::remove(folder_ / "tokenizer_config.json");
  EXPECT_TRUE(hugging_face_frame(folder_.path()).bos);

  for (const std::string& none : {plain, std::string("{}"), std::string(R"({"post_processor": null})")}) {
    EXPECT_FALSE(frame(mistral, none).bos) << none;
    EXPECT_THAT(frame(mistral, none).remarks, IsEmpty()) << none;
    const HuggingFaceFrame of_class = frame(llama, none);  // as saved with add_bos_token = false
    EXPECT_FALSE(of_class.bos) << none;
    EXPECT_THAT(of_class.remarks,
                ElementsAre(AllOf(HasSubstr("puts no id in front of a text, and LlamaTokenizer of transformers 4 puts an id"), HasSubstr("data.bos"))));
  }
  EXPECT_THAT(frame(llama, begun).remarks, IsEmpty());

  for (const bool said : {false, true}) {  // each of the two is taken by one version
    EXPECT_EQ(frame({{"add_bos_token", said}}, said ? plain : begun).bos, said);
    EXPECT_THAT(frame({{"add_bos_token", said}}, said ? plain : begun).remarks,
                ElementsAre(AllOf(HasSubstr(said ? "add_bos_token = true contradicts" : "add_bos_token = false contradicts"),
                                  HasSubstr(said ? "puts no id" : "puts '<s>'"), HasSubstr("transformers 4"), HasSubstr("data.bos"))));
    EXPECT_THAT(frame({{"add_bos_token", said}, {"bos_token", "<s>"}}, said ? begun : plain).remarks, IsEmpty());
  }
  EXPECT_THAT(frame({{"add_bos_token", true}, {"bos_token", "</s>"}}, begun).remarks, ElementsAre(HasSubstr("contradicts")));

  for (const std::string wrong : {R"({"post_processor": {"type": "RobertaProcessing"}})", R"({"post_processor": {"type": "TemplateProcessing"}})",
                                  R"({"post_processor": 3})", R"({"post_processor": {"type": "TemplateProcessing", "single": []}})", "version https://git-lfs",
                                  R"({"post_processor": {"type": "Sequence", "processors": [{"type": "RobertaProcessing"}]}})"}) {
    EXPECT_FALSE(frame(mistral, wrong).bos) << wrong;
    EXPECT_THAT(frame(mistral, wrong).remarks, ElementsAre(AllOf(HasSubstr("cannot be told"), HasSubstr("no id is put"), HasSubstr("data.bos")))) << wrong;
    EXPECT_TRUE(frame(llama, wrong).bos) << wrong;
    EXPECT_THAT(frame(llama, wrong).remarks, ElementsAre(HasSubstr(": an id is put in front of a text, as LlamaTokenizer does"))) << wrong;
    EXPECT_THAT(frame({{"add_bos_token", true}}, wrong).remarks, IsEmpty()) << "it is not asked";
  }
}

/// As transformers 4.57 and 5.24 tokenize: beside tokenizer.json, classes other than a LLaMA's pass over the two flags.
TEST_F(HuggingFaceTokenizer, AFlagThatTheClassDoesNotHeedSaysNothing) {
  using testing::ElementsAre;
  const std::string plain = processor(text_), begun = processor(bos_ + "," + text_), null = R"({"post_processor": null})";
  nlohmann::json config{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"add_bos_token", true}, {"add_eos_token", true}, {"bos_token", "<s>"}};
  for (const std::string& none : {plain, null}) {
    EXPECT_FALSE(frame(config, none).bos) << none;
    EXPECT_FALSE(frame(config, none).eos) << none;
    EXPECT_EQ(frame(config, none).file, folder_ / "tokenizer.json");
    EXPECT_THAT(frame(config, none).remarks,
                ElementsAre(AllOf(HasSubstr("add_bos_token = true contradicts the post_processor of"), HasSubstr("which puts no id in front of a text"),
                                  HasSubstr("PreTrainedTokenizerFast of transformers 4 and of 5 goes by the second, as is done here"), HasSubstr("data.bos"))));
  }
  EXPECT_TRUE(frame(config, begun).bos);
  EXPECT_THAT(frame(config, begun).remarks, testing::IsEmpty());
  EXPECT_TRUE(frame(config).bos) << "without the file it is heeded";
  EXPECT_TRUE(frame(config, "version https://git-lfs").bos);
  EXPECT_THAT(frame(config, "version https://git-lfs").remarks,
              ElementsAre(AllOf(HasSubstr("cannot be told"), HasSubstr("PreTrainedTokenizerFast goes by that: an id is put"))));
  config["add_bos_token"] = false;
  EXPECT_TRUE(frame(config, begun).bos);
  EXPECT_THAT(frame(config, begun).remarks, ElementsAre(HasSubstr("add_bos_token = false contradicts")));
  config["tokenizer_class"] = "LlamaTokenizerFast";
  EXPECT_FALSE(frame(config, begun).bos) << "transformers 4 makes the post_processor anew";
  EXPECT_TRUE(frame(config, begun).eos);
}

TEST_F(HuggingFaceTokenizer, ACodeLlamasPutsAnIdInFrontWhateverThePostProcessor) {
  const std::string both = processor(bos_ + "," + text_ + "," + eos_);
  for (const std::string name : {"CodeLlamaTokenizer", "CodeLlamaTokenizerFast"}) {
    nlohmann::json config{{"tokenizer_class", name}};
    for (const std::string& file :
         {processor(text_), both, std::string(R"({"post_processor": null})"), std::string("version https://git-lfs"), std::string()}) {
      EXPECT_TRUE(frame(config, file).bos) << name << file;
      EXPECT_FALSE(frame(config, file).eos) << name << file;
      EXPECT_THAT(frame(config, file).remarks, testing::IsEmpty()) << name << file;
    }
    config["add_bos_token"] = false;
    EXPECT_FALSE(frame(config, both).bos);
    EXPECT_THAT(frame(config, both).remarks, testing::ElementsAre(AllOf(HasSubstr("add_bos_token = false is what " + name + " of transformers 4 goes by"),
                                                                        HasSubstr("that of 5 puts an id in front of a text all the same"))));
    EXPECT_THAT(frame(config).remarks, testing::IsEmpty()) << "without tokenizer.json, both go by it";
  }
}

TEST_F(HuggingFaceTokenizer, NamesTheTokenInFrontOfAText) {
  using testing::IsEmpty;
  nlohmann::json config{{"add_bos_token", true}};
  EXPECT_EQ(frame(config).bos_token.text, std::nullopt) << "the tokenizer's own";
  config["bos_token"] = "</s>";
  EXPECT_EQ(frame(config).bos_token.text, "</s>");
  EXPECT_EQ(frame(config).bos_token.id, std::nullopt);
  config["bos_token"] = {{"__type", "AddedToken"}, {"content", "[BOS]"}};
  config["added_tokens_decoder"] = {{"1", {{"content", "[BOS]"}}}};
  EXPECT_EQ(frame(config).bos_token.text, "[BOS]");
  EXPECT_EQ(frame(config).bos_token.id, 1) << "a piece may have another name there";
  EXPECT_FALSE(frame(config).eos);
  config["add_eos_token"] = true;
  EXPECT_TRUE(frame(config).eos);
  EXPECT_EQ(frame(config).eos_token.text, std::nullopt) << "the tokenizer's own";
  config["eos_token"] = "<|im_end|>";
  config["added_tokens_decoder"]["32000"] = {{"content", "<|im_end|>"}};
  EXPECT_EQ(frame(config).eos_token.text, "<|im_end|>");
  EXPECT_EQ(frame(config).eos_token.id, 32000);
  config["eos_token"] = nullptr;
  EXPECT_FALSE(frame(config).eos);
  config["bos_token"] = nullptr;
  EXPECT_FALSE(frame(config).bos);
  EXPECT_THAT(frame(config).remarks, testing::ElementsAre(HasSubstr("bos_token = null: there is no id to put in front of a text")));
  config["bos_token"] = 3;
  EXPECT_THAT([&] { frame(config); }, ThrowsMessage<ConfigError>(HasSubstr("tokenizer_config.json: bos_token = 3 is of the wrong type")));
  config["bos_token"] = "<s>";
  write_all(folder_ / "special_tokens_map.json", R"({"bos_token": "</s>"})");
  EXPECT_EQ(frame(config).bos_token.text, "<s>");
  config.erase("added_tokens_decoder");
  EXPECT_EQ(frame(config).bos_token.text, "</s>") << "as older files say it";
}

TEST_F(HuggingFaceTokenizer, SaysWhereTextsEndAndWhatWasAdded) {
  const TemporaryFolder& folder = folder_;
  const auto ends = [&] { return hugging_face_ends(folder.path()); };
  EXPECT_THAT(ends(), testing::IsEmpty());
  write_all(folder / "config.json", R"({"eos_token_id": 2})");
  EXPECT_THAT(ends(), testing::ElementsAre(2));
  write_all(folder / "generation_config.json", R"({"eos_token_id": [32000, 2, 7]})");
  EXPECT_THAT(ends(), testing::ElementsAre(2, 7, 32000));
  write_all(folder / "config.json", R"({"eos_token_id": null})");
  write_all(folder / "generation_config.json", "{}");
  EXPECT_THAT(ends(), testing::IsEmpty());
  for (const char* wrong : {R"("</s>")", "[2, true]", "2.5", R"({"id": 2})"}) {
    write_all(folder / "config.json", detail::concat(R"({"eos_token_id": )", wrong, "}"));
    EXPECT_THAT([&] { ends(); }, ThrowsMessage<ConfigError>(HasSubstr("config.json: eos_token_id = "))) << wrong;
  }

  using Added = std::map<int64_t, std::string>;
  const auto added = [&](int64_t ids) { return hugging_face_added_tokens(folder.path(), ids); };
  EXPECT_EQ(added(0), Added{});
  write_all(folder / "added_tokens.json", R"({"<|im_end|>": 10, "<s>": 1})");
  write_all(folder / "tokenizer_config.json", R"({"added_tokens_decoder": {"1": {"content": "<s>"}, "11": {"content": "<pad>"}, "12": null}})");
  EXPECT_EQ(added(10), (Added{{10, "<|im_end|>"}, {11, "<pad>"}, {12, "?"}}));
  write_all(folder / "tokenizer_config.json", R"({"added_tokens_decoder": {"1x": {"content": "<s>"}}})");
  EXPECT_THAT([&] { added(10); }, ThrowsMessage<ConfigError>(HasSubstr("added_tokens_decoder: '1x' is no id")));
}

TEST_F(HuggingFaceTokenizer, ReadsWhichIdsPiecesHave) {
  using Ids = std::map<std::string, int64_t>;
  const auto read = [&](const std::string& name, const std::string& text) {
    write_all(folder_ / name, text);
    const auto found = hugging_face_vocabulary(folder_.path());
    EXPECT_EQ(found->file, folder_ / name);
    return found->ids;
  };
  EXPECT_FALSE(hugging_face_vocabulary(folder_.path()));
  EXPECT_EQ(read("vocab.json", R"({"!": 0, "added_tokens": 1})"), (Ids{{"!", 0}, {"added_tokens", 1}}));
  const std::string name = "tokenizer.json";
  EXPECT_EQ(read(name, R"({"model": {"vocab": {"<s>": 1, "e": 3}}, "added_tokens": [{"id": 1, "content": "<s>"}, {"id": 9, "content": "<|im_end|>"}]})"),
            (Ids{{"<s>", 1}, {"e", 3}, {"<|im_end|>", 9}}));
  EXPECT_EQ(read(name, R"({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["e", -1.5]]}})"), (Ids{{"<unk>", 0}, {"e", 1}}));
  for (const char* wrong : {"version https://git-lfs", "{}", "[]", R"({"model": {"vocab": {"e": "3"}}})", R"({"model": {"vocab": ["e"]}})"})
    EXPECT_EQ(read(name, wrong), Ids{}) << wrong;
}

TEST(LoadHuggingFace, FillsLlamaInAnyDtype) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const TemporaryFolder folder;
    auto tensors = llama_tensors();
    for (auto& [name, tensor] : tensors) tensor = tensor.to(dtype);
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({1});
    write_model(folder, llama_config(), tensors);
    const auto model = read_hugging_face_config(config_for(folder.path()));
    const auto targets = targets_for(model);
    load_hugging_face(folder.path(), model, targets);
    EXPECT_EQ(targets.size(), llama_tensors().size());
    for (const auto& [ours, theirs] : std::map<std::string, std::string>{{"embed_tokens.weight", "model.embed_tokens.weight"},
                                                                         {"layers.1.attention.wk.weight", "model.layers.1.self_attn.k_proj.weight"},
                                                                         {"layers.0.feed_forward.w1.weight", "model.layers.0.mlp.gate_proj.weight"},
                                                                         {"layers.0.feed_forward.w2.weight", "model.layers.0.mlp.down_proj.weight"},
                                                                         {"layers.1.feed_forward.w3.weight", "model.layers.1.mlp.up_proj.weight"},
                                                                         {"layers.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"},
                                                                         {"head.weight", "lm_head.weight"}}) {
      EXPECT_TRUE(at::equal(find(targets, ours), tensors.at(theirs).to(at::kFloat))) << ours;
    }
  }
}

TEST(LoadHuggingFace, ANumberBeyondTheFormatOfTheModelIsNoDamage) {
  const TemporaryFolder folder;
  auto tensors = llama_tensors();
  tensors.at("model.layers.1.mlp.up_proj.weight").view({-1})[5] = 123456;
  write_model(folder, llama_config(), tensors);
  const auto model = read_hugging_face_config(config_for(folder.path()));
  auto targets = targets_for(model);
  load_hugging_face(folder.path(), model, targets);
  for (auto& target : targets) target.tensor = target.tensor.to(at::kHalf);
  EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("precision.params = fp16: model.layers.1.mlp.up_proj.weight of "), HasSubstr("holds 123456"),
                                               HasSubstr("set precision.params = bf16 or fp32"))));
}

TEST(LoadHuggingFace, SplitsAndTransposesGpt2WithAndWithoutPrefix) {
  for (const std::string prefix : {"transformer.", ""}) {
    const TemporaryFolder folder;
    auto tensors = gpt2_tensors(prefix);
    tensors[prefix + "h.0.attn.bias"] = at::ones({1, 1, 10, 10});
    tensors[prefix + "h.0.attn.masked_bias"] = at::ones({});
    tensors["lm_head.weight"] = tensors.at(prefix + "wte.weight");
    write_model(folder, gpt2_config(), tensors);
    const auto model = read_hugging_face_config(config_for(folder.path()));
    const auto targets = targets_for(model);
    load_hugging_face(folder.path(), model, targets);
    const auto fused = tensors.at(prefix + "h.0.attn.c_attn.weight"), bias = tensors.at(prefix + "h.0.attn.c_attn.bias");
    EXPECT_TRUE(at::equal(find(targets, "layers.0.attention.wq.weight"), fused.narrow(1, 0, 6).t()));
    EXPECT_TRUE(at::equal(find(targets, "layers.0.attention.wk.weight"), fused.narrow(1, 6, 6).t()));
    EXPECT_TRUE(at::equal(find(targets, "layers.0.attention.wv.weight"), fused.narrow(1, 12, 6).t()));
    EXPECT_TRUE(at::equal(find(targets, "layers.0.attention.wv.bias"), bias.narrow(0, 12, 6)));
    EXPECT_TRUE(at::equal(find(targets, "layers.0.feed_forward.w1.weight"), tensors.at(prefix + "h.0.mlp.c_fc.weight").t()));
    EXPECT_TRUE(at::equal(find(targets, "embed_positions.weight"), tensors.at(prefix + "wpe.weight")));
    EXPECT_TRUE(at::equal(find(targets, "norm.bias"), tensors.at(prefix + "ln_f.bias")));
  }
}

TEST(LoadHuggingFace, TakesTheFirstPositionsOfALongerTable) {
  const TemporaryFolder folder;
  write_model(folder, gpt2_config(), gpt2_tensors());
  Config config = config_for(folder.path());
  config.model.max_seq_len = 4;
  const auto model = read_hugging_face_config(config);
  const auto targets = targets_for(model);
  load_hugging_face(folder.path(), model, targets);
  EXPECT_TRUE(at::equal(find(targets, "embed_positions.weight"), gpt2_tensors().at("transformer.wpe.weight").narrow(0, 0, 4)));
}

TEST(LoadHuggingFace, ATableOfPositionsIsThatOfTheFoldersOwnModel) {
  for (const int64_t rows : {9, 11}) {
    const TemporaryFolder folder;
    auto tensors = gpt2_tensors();
    tensors["transformer.wpe.weight"] = at::randn({rows, 6});
    write_model(folder, gpt2_config(), tensors);
    for (const std::optional<int64_t> used : {std::optional<int64_t>(), std::optional<int64_t>(4)}) {
      Config config = config_for(folder.path());
      config.model.max_seq_len = used;
      const auto model = read_hugging_face_config(config);
      EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets_for(model)); },
                  ThrowsMessage<ConfigError>(HasSubstr(detail::concat("shape of transformer.wpe.weight: [", rows, ", 6] in the file, [10, 6] in the model"))));
    }
  }
}

TEST(LoadHuggingFace, ReadsShardedFilesAndOnlyTheSlicesAskedFor) {
  const TemporaryFolder folder;
  write_all(folder / "config.json", llama_config().dump());
  Tensors first, second;
  nlohmann::json map;
  for (const auto& [name, tensor] : llama_tensors()) {
    const bool early = first.size() < 9;
    (early ? first : second)[name] = tensor;
    map[name] = early ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
  }
  write_safetensors(folder / "model-00001-of-00002.safetensors", first);
  write_safetensors(folder / "model-00002-of-00002.safetensors", second);
  write_all(folder / "model.safetensors.index.json", nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());

  const auto model = read_hugging_face_config(config_for(folder.path()));
  const std::vector<SlicedTensor> targets{{at::zeros({3, 8}), Slice::along("head.weight", {11, 8}, 0, 4, 3)},
                                          {at::zeros({8, 5}), Slice::along("layers.1.feed_forward.w2.weight", {8, 12}, 1, 7, 5)}};
  load_hugging_face(folder.path(), model, targets);
  EXPECT_TRUE(at::equal(targets[0].tensor, llama_tensors().at("lm_head.weight").narrow(0, 4, 3)));
  EXPECT_TRUE(at::equal(targets[1].tensor, llama_tensors().at("model.layers.1.mlp.down_proj.weight").narrow(1, 7, 5)));

  const auto expect_refused = [&](const nlohmann::json& index, const std::string& reason) {
    write_all(folder / "model.safetensors.index.json", index.dump());
    EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets); }, ThrowsMessage<ConfigError>(HasSubstr(reason)));
  };
  expect_refused({{"weight_map", {{"a", "../other.safetensors"}}}}, "no name of a file beside it");
  expect_refused({{"weight_map", {{"a", 3}}}}, "no name of a file beside it");
  expect_refused({{"weight_map", {{"a", "model-00003.safetensors"}}}}, "model-00003.safetensors");
  expect_refused({{"map", 1}}, "has no weight_map");
}

TEST(LoadHuggingFace, TakesTheFileThatConfigNames) {
  const TemporaryFolder folder;
  auto json = llama_config();
  auto tensors = llama_tensors();
  write_model(folder, json, tensors);
  const std::string usual = hugging_face_fingerprint(folder.path());
  tensors["lm_head.weight"] = at::randn({11, 8});
  write_safetensors(folder / "best.safetensors", tensors);
  nlohmann::json map;
  for (const auto& [name, tensor] : tensors) map[name] = "best.safetensors";
  write_all(folder / "best.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  for (const char* named : {"best.safetensors", "best.safetensors.index.json"}) {
    json["transformers_weights"] = named;
    const auto model = read_config(folder, json);
    const auto targets = targets_for(model);
    load_hugging_face(folder.path(), model, targets);
    EXPECT_TRUE(at::equal(find(targets, "head.weight"), tensors.at("lm_head.weight"))) << named;
    EXPECT_NE(hugging_face_fingerprint(folder.path()), usual) << named;
  }
  json["transformers_weights"] = "gone.safetensors";
  const auto model = read_config(folder, json);
  EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets_for(model)); },
              ThrowsMessage<ConfigError>(HasSubstr("transformers_weights = \"gone.safetensors\": no such file there")));
}

TEST(HuggingFaceFingerprint, SeesWhatLiesBesideTheFirstColumnsOfEachRow) {
  const TemporaryFolder folder;
  const auto fingerprint = [&](const at::Tensor& weight) {
    write_safetensors(folder / "model.safetensors", {{"c_attn.weight", weight}});
    return hugging_face_fingerprint(folder.path());
  };
  const at::Tensor q_k_v = at::ones({64, 3 * 512});
  const std::string before = fingerprint(q_k_v);
  EXPECT_EQ(fingerprint(q_k_v.clone()), before);
  for (const int64_t first : {0, 512, 1024}) {
    at::Tensor changed = q_k_v.clone();
    changed.narrow(1, first, 512).mul_(2);
    EXPECT_NE(fingerprint(changed), before) << "columns from " << first;
  }
  EXPECT_NE(fingerprint(q_k_v.view({128, 3 * 256})), before) << "the same bytes in another shape";
}

TEST(LoadHuggingFace, RefusesWithTheFullListBeforeTouchingAnything) {
  const TemporaryFolder folder;
  auto tensors = llama_tensors();
  tensors.erase("model.norm.weight");
  tensors.erase("lm_head.weight");
  tensors["model.layers.2.input_layernorm.weight"] = at::ones({8});
  tensors["model.layers.0.mlp.up_proj.weight"] = at::ones({8, 12});
  tensors["model.layers.1.input_layernorm.weight"] = at::ones({8}, at::kLong);
  write_model(folder, llama_config(), tensors);
  const auto model = read_hugging_face_config(config_for(folder.path()));
  const auto targets = targets_for(model);
  EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("missing model.norm.weight"), HasSubstr("missing lm_head.weight"),
                                               HasSubstr("extra model.layers.2.input_layernorm.weight"),
                                               HasSubstr("shape of model.layers.0.mlp.up_proj.weight: [8, 12] in the file, [12, 8] in the model"),
                                               HasSubstr("dtype of model.layers.1.input_layernorm.weight: I64"))));
  for (const auto& target : targets) EXPECT_TRUE(target.tensor.eq(0).all().item<bool>());
  std::filesystem::remove(folder / "model.safetensors");
  EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets); },
              ThrowsMessage<ConfigError>(HasSubstr("neither model.safetensors nor model.safetensors.index.json")));
}

TEST(LoadHuggingFace, TiedFilesNeedNoHead) {
  const TemporaryFolder folder;
  auto json = llama_config();
  json["tie_word_embeddings"] = true;
  auto tensors = llama_tensors();
  tensors.erase("lm_head.weight");
  write_model(folder, json, tensors);
  const auto model = read_hugging_face_config(config_for(folder.path()));
  const auto targets = targets_for(model);
  load_hugging_face(folder.path(), model, targets);
  EXPECT_EQ(targets.size(), tensors.size());
}

TEST(LoadHuggingFace, ATiedHeadIsTheEmbedding) {
  for (auto [json, tensors] :
       {std::pair(llama_config(), llama_tensors()), std::pair(gpt2_config(), gpt2_tensors()), std::pair(gpt2_config(), gpt2_tensors(""))}) {
    const TemporaryFolder folder;
    json["tie_word_embeddings"] = true;
    const bool llama = tensors.contains("model.embed_tokens.weight");
    const at::Tensor embedding = tensors.at(llama ? "model.embed_tokens.weight" : tensors.contains("wte.weight") ? "wte.weight" : "transformer.wte.weight");
    tensors["lm_head.weight"] = embedding;
    write_model(folder, json, tensors);
    const auto model = read_hugging_face_config(config_for(folder.path()));
    EXPECT_NO_THROW(load_hugging_face(folder.path(), model, targets_for(model))) << "some files repeat it";
    const std::string before = hugging_face_fingerprint(folder.path());
    EXPECT_EQ(hugging_face_fingerprint(folder.path()), before);
    tensors["lm_head.weight"] = embedding + 1;
    write_model(folder, json, tensors);
    EXPECT_NE(hugging_face_fingerprint(folder.path()), before);
    EXPECT_THAT([&] { load_hugging_face(folder.path(), model, targets_for(model)); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("lm_head.weight is not the embedding"), HasSubstr("tie_word_embeddings"))));
  }
}

TEST(Dump, GivesBackTheFilesThatWereRead) {
  for (const auto& [json, tensors] : {std::pair(llama_config(), llama_tensors()), std::pair(gpt2_config(), gpt2_tensors())}) {
    const TemporaryFolder folder;
    write_model(folder, json, tensors);
    const auto model = read_hugging_face_config(config_for(folder.path()));
    const auto whole = targets_for(model);
    load_hugging_face(folder.path(), model, whole);
    for (const int ranks : {1, 2, 3, 5}) {
      comm::run_ranks(ranks, [&](comm::World& world) {
        std::vector<SlicedTensor> mine;
        for (size_t i = 0; i < whole.size(); ++i) {  // some tensors on all ranks, some on one, most cut by rows
          const auto& [tensor, slice] = whole[i];
          if (i % 4 == 0) {
            mine.push_back({tensor, slice});
          } else if (i % 4 == 1) {
            if (world.rank() == static_cast<int>(i) % ranks) mine.push_back({tensor, slice});
          } else {
            const auto [begin, size] = chunk(slice.shape[0], ranks, world.rank());
            mine.push_back({tensor.narrow(0, begin, size), Slice::along(slice.name, slice.shape, 0, begin, size)});
          }
        }
        dump(folder / "dump.safetensors", model, mine, world.group());
      });
      expect_equal(read_safetensors(folder / "dump.safetensors"), tensors);
    }
  }
}

TEST(Dump, WritesZerosForWhatGotNoGradientAndOwnNamesOfOtherFamilies) {
  const TemporaryFolder folder;
  ModelConfig model;
  model.family = "mlp";
  dump(folder / "grad.safetensors", model, {{at::Tensor(), Slice::whole("b", {3})}, {at::ones({2, 2}), Slice::whole("a", {2, 2})}}, comm::Group::self());
  expect_equal(read_safetensors(folder / "grad.safetensors"), {{"a", at::ones({2, 2})}, {"b", at::zeros({3})}});
}

TEST(Dump, FailsOnEveryRankWhereItCannotWrite) {
  const TemporaryFolder folder;
  ModelConfig model;
  model.family = "mlp";
  comm::run_ranks(2, [&](comm::World& world) {
    const std::vector<SlicedTensor> mine{{at::ones({1, 2}), Slice::along("a", {2, 2}, 0, world.rank(), 1)}};
    EXPECT_THAT([&] { dump(folder / "nowhere/grad.safetensors", model, mine, world.group()); },
                ThrowsMessage<Error>(AllOf(HasSubstr("rank 0"), HasSubstr("nowhere"))));
  });
}

TEST(Dump, MissingAndUnknownTensorsAreOurBug) {
  const TemporaryFolder folder;
  write_model(folder, llama_config(), llama_tensors());
  const auto model = read_hugging_face_config(config_for(folder.path()));
  auto tensors = targets_for(model);
  tensors.pop_back();
  EXPECT_THROW(dump(folder / "d.safetensors", model, tensors, comm::Group::self()), InternalError);
  tensors = targets_for(model);
  tensors.push_back({at::ones({1}), Slice::whole("stray", {1})});
  EXPECT_THROW(dump(folder / "d.safetensors", model, tensors, comm::Group::self()), InternalError);
}

/// Beside adapters some weights are kept in fewer bits, and are among no tensors.
TEST(Dump, GivesOurNamesToWhatIsLeftOfATensorOfSeveralParts) {
  const TemporaryFolder folder;
  write_model(folder, gpt2_config(), gpt2_tensors());
  const auto model = read_hugging_face_config(config_for(folder.path()));
  const auto whole = targets_for(model);
  load_hugging_face(folder.path(), model, whole);
  const std::string attention = "layers.0.attention.";
  for (const std::set<std::string>& missing : {std::set<std::string>{"wq"}, {"wk"}, {"wv"}, {"wk", "wv"}, {"wq", "wk", "wv"}}) {
    std::vector<SlicedTensor> tensors{{at::ones({2, 6}), Slice::whole(attention + "wq.lora_a", {2, 6})}};
    auto expected = gpt2_tensors();
    ASSERT_EQ(expected.erase("transformer.h.0.attn.c_attn.weight"), 1);
    expected[attention + "wq.lora_a"] = tensors[0].tensor;
    for (const auto& target : whole) {
      const std::string& name = target.slice.name;
      const bool part = name.starts_with(attention) && name.ends_with(".weight") && !name.ends_with("wo.weight");
      if (part && missing.contains(name.substr(attention.size(), 2))) continue;
      if (part) expected[name] = target.tensor;
      tensors.push_back(target);
    }
    dump(folder / "d.safetensors", model, tensors, comm::Group::self());
    expect_equal(read_safetensors(folder / "d.safetensors"), expected);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
