#include "tessera/train/reading.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/meeting/disagreement.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/train/adapters.h"
#include "tessera/train/inputs.h"
#include "tests/refusal.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class FoundModels : public testing_support::TrainFixture {
 protected:
  /// As find_model gives it: trained with the tokenizer of that fingerprint, whose file was `saved`.
  FoundModel found(const std::string& fingerprint, const std::string& saved = "byte") const {
    Config trained = config("llama");
    trained.data.tokenizer = saved;
    FoundCheckpoint checkpoint{.folder = "/ckpt/step-00000002", .manifest = {}, .config = config("llama")};
    checkpoint.manifest.step = 2;
    checkpoint.manifest.run.run = "abc", checkpoint.manifest.run.start = "def";
    checkpoint.manifest.progress = {{"config", to_toml(trained)}};
    checkpoint.manifest.agreement = checkpoint::agreement_of(trained, {{"tokenizer", fingerprint}});
    checkpoint.remarks = {"passing over another"};
    return {.config = config("llama"), .checkpoint = checkpoint};
  }
  /// Trained with `trained`, and read with `sets` over that.
  FoundModel found_of(const std::string& family, const std::vector<std::string>& trained, const std::vector<std::string>& sets) const {
    FoundModel model = found(byte_);
    const Config saved = config(family, trained);
    model.checkpoint->manifest.progress["config"] = to_toml(saved);
    model.checkpoint->manifest.agreement = checkpoint::agreement_of(saved, {{"tokenizer", byte_}});
    model.checkpoint->sets = sets;
    model.config = trained_config(*model.checkpoint, sets);
    return model;
  }
  const std::string byte_ = data::Tokenizer::load("byte")->fingerprint();
};

TEST_F(FoundModels, TakesTheTokenizerThatTheModelWasTrainedWith) {
  EXPECT_THAT(find_tokenizer(found(byte_), "").remarks, IsEmpty());
  EXPECT_THAT(find_tokenizer(found(byte_, "/moved.model"), "byte").remarks, IsEmpty()) << "what it holds counts, not where it lies";
  EXPECT_THAT(testing_support::refusal([&] { find_tokenizer(found("other"), ""); }),
              testing::AllOf(HasSubstr("data.tokenizer = byte: is not the tokenizer that /ckpt/step-00000002"), HasSubstr("--tokenizer")));
  const auto said = ElementsAre(HasSubstr("is not the tokenizer that /ckpt/step-00000002 was trained with (/t.model"));
  EXPECT_THAT(find_tokenizer(found("other", "/t.model"), "byte").remarks, said) << "named by the flag";
  EXPECT_THAT(find_tokenizer(found("other", "/t.model"), "").remarks, said) << "named by --set";
  EXPECT_THAT(find_tokenizer({.config = config("llama"), .checkpoint = {}}, "").remarks, IsEmpty()) << "of a Hugging Face model none is known";
}

TEST_F(FoundModels, SaysWhatWasPassedOverAndWhatHasNoEffect) {
  EXPECT_THAT(reading_remarks(found(byte_), {"run.threads=1"}), ElementsAre("passing over another"));
  EXPECT_THAT(reading_remarks(found(byte_), {"optim.lr=0.01"}), ElementsAre("passing over another", HasSubstr("optim.lr = 0.01: has no effect")));
  FoundModel wrong = found(byte_);
  wrong.config.optim.lr = -1;
  EXPECT_THAT(testing_support::refusal([&] { reading_remarks(wrong, {"optim.lr=-1"}); }), HasSubstr("optim.lr = -1"));
  const auto of_mixture = [&](const std::string& set) { return reading_remarks(found_of("mixtral", {}, {set}), {set}); };
  EXPECT_THAT(of_mixture("moe.capacity_factor=0.01"), testing::Contains(HasSubstr("has no effect"))) << "a batch in training is not read";
  EXPECT_THAT(testing_support::refusal([&] { of_mixture("moe.capacity_factor=-1"); }), HasSubstr("moe.capacity_factor = -1"));
}

/// What is read need be nothing that could be trained, beside which values of what is not are looked at.
TEST_F(FoundModels, WhatHasNoEffectIsHeldAgainstARunAndNotAgainstWhatIsRead) {
  const std::vector<std::string> scaled{"precision.compute=fp16", "precision.loss_scale=1024"}, idle{"batch.micro_size=7"};
  const auto said = [&](const std::vector<std::string>& trained, std::vector<std::string> sets) {
    return reading_remarks(found_of("llama", trained, sets), sets);
  };
  const auto has_none = testing::Contains(HasSubstr("batch.micro_size = 7: has no effect"));
  EXPECT_THAT(said(scaled, {"precision.compute=fp32", "batch.micro_size=7"}), has_none);
  EXPECT_THAT(said({}, {"quantize.modules=layers.*.attention.*", "batch.micro_size=7"}), has_none);
  EXPECT_THAT(said({}, {scaled[0], scaled[1]}), testing::Contains(HasSubstr("precision.loss_scale = 1024: has no effect"))) << "beside what is read";
  EXPECT_THAT(testing_support::refusal([&] { said(scaled, {"precision.compute=fp32", "optim.lr=-1"}); }), HasSubstr("optim.lr = -1"));
}

TEST_F(FoundModels, SaysWhatBeginsAnewAndWhichFoldersNobodyReads) {
  const std::string adapted = "lora.modules=layers.*.attention.*", partial = "checkpoint.partial=[\"**.lora_a\", \"**.lora_b\"]", peft = "lora.from_peft=/a";
  const auto said = [&](const std::vector<std::string>& trained, const std::vector<std::string>& sets) {
    FoundModel model = found_of("llama", trained, sets);
    const Config saved = config("llama", trained);
    const auto held = on_meta([&] { return make_model(saved.model); });
    const Attachment adapters = add_adapters(saved, *held);
    for (const auto& each : nn::unique_parameters(*held)) model.checkpoint->manifest.tensors["model." + each.name].shape = each.tensor.sizes().vec();
    return reading_remarks(model, sets);
  };
  const auto unread = [](const char* key) { return testing::AllOf(HasSubstr(key), HasSubstr("not read")); };
  EXPECT_THAT(said({}, {adapted, partial, peft}), testing::AllOf(testing::Contains(HasSubstr("begin anew (layers.0.attention.wq.lora_a, ")),
                                                                 testing::Not(testing::Contains(unread("lora.from_peft")))));
  EXPECT_THAT(said({adapted}, {peft}), ElementsAre("passing over another", unread("lora.from_peft = /a")));
  EXPECT_THAT(said({adapted}, {partial, peft}), testing::Contains(unread("lora.from_peft = /a"))) << "what fits is loaded all the same";
  EXPECT_THAT(said({adapted, peft}, {}), ElementsAre("passing over another")) << "named by the run that trained it";
  EXPECT_THAT(said({}, {peft}), testing::Contains("lora.from_peft = /a: has no effect without lora.modules"));
  EXPECT_THAT(said({}, {"model.from_hf=/a"}), ElementsAre("passing over another", unread("model.from_hf = /a: the weights are those of /ckpt/step-00000002")));
  EXPECT_THAT(reading_remarks({.config = config("llama", {peft}), .checkpoint = {}}, {peft}), ElementsAre(HasSubstr("has no effect without lora.modules")));
}

/// Whatever else is set, as it has no effect.
TEST_F(FoundModels, APassHasTheWindowsOfThoseThatTrainedExpertsThatChoose) {
  const auto windows = [&](const char* router) {
    return windows_of_a_pass(found_of("mixtral", {std::string("model.router=") + router, "batch.micro_size=7"}, {"batch.micro_size=2"}));
  };
  EXPECT_EQ(windows("expert_choice"), 7);
  EXPECT_EQ(windows("softmax"), 1);
}

TEST_F(FoundModels, SaysWhatMakesAnotherModelOfTheSameWeights) {
  const auto said = [&](const std::vector<std::string>& sets) {
    FoundModel other = found(byte_);
    other.config = config("llama", sets);
    return reading_remarks(other, sets);
  };
  EXPECT_THAT(said({"model.rope_theta=500"}),
              ElementsAre("passing over another", "/ckpt/step-00000002: was trained with model.rope_theta = 10000.0; this is another model, with 500.0"));
  EXPECT_THAT(said({"lora.alpha=3", "quantize.block=32"}), ElementsAre("passing over another")) << "of what it has none of";
  FoundModel adapted = found(byte_);
  adapted.config = config("llama", {"lora.modules=layers.*", "lora.alpha=3"});
  adapted.checkpoint->manifest.agreement["lora.modules"] = "layers.*";
  EXPECT_THAT(reading_remarks(adapted, {}), ElementsAre("passing over another", HasSubstr("lora.alpha = 16.0; this is another model, with 3.0")));
  EXPECT_THAT(said({"model.norm_eps=0.1", "model.sliding_window=2"}), testing::SizeIs(3)) << "each of them";
  EXPECT_THAT(said({"data.documents=lines", "run.threads=1"}), ElementsAre("passing over another")) << "the same model, of another text, elsewhere";
  FoundModel older = found(byte_);
  older.checkpoint->manifest.agreement.erase("model.norm_topk");
  EXPECT_THAT(reading_remarks(older, {}), ElementsAre("passing over another")) << "from before there was such a key";
}

TEST_F(FoundModels, TellsCheckpointsApart) {
  const FoundTokenizer text = find_tokenizer(found(byte_), "");
  EXPECT_THAT(reading_settings(found(byte_), text), testing::Contains(std::pair<std::string, std::string>("--checkpoint", "step 2 of run abc, start def")));
  FoundTokenizer begins = find_tokenizer(found(byte_), "");
  begins.bos = true;
  EXPECT_TRUE(comm::disagreement({reading_settings(found(byte_), text), reading_settings(found(byte_), begins)})) << "data.bos, as files say it";
  FoundModel fork = found(byte_);
  fork.checkpoint->manifest.run.start = "ghi";
  EXPECT_TRUE(comm::disagreement({reading_settings(found(byte_), text), reading_settings(fork, text)})) << "of one run, and gone on from twice";
}

TEST_F(FoundModels, TellsWhatBeginsBesideThemAndHowStagesAreSteppedThrough) {
  const FoundTokenizer text = find_tokenizer(found(byte_), "");
  const auto adapter = [&](const char* name) {
    std::filesystem::create_directories(folder_ / name);
    checkpoint::SafetensorsWriter file(folder_ / name / "adapter_model.safetensors", {{"w", at::kFloat, {2}}});
    file.write(at::full({2}, static_cast<double>(name[0])));
    file.finish();
    return "lora.from_peft=" + (folder_ / name).string();
  };
  const std::string a = adapter("a"), b = adapter("b"), modules = "lora.modules=layers.*.attention.*";
  const auto of = [&](const std::vector<std::string>& sets) { return reading_settings(found_of("llama", {}, sets), text); };
  const auto differ = [&](std::vector<std::string> sets, const std::string& one, const std::string& other) {
    auto others = sets;
    sets.push_back(one), others.push_back(other);
    return comm::disagreement({of(sets), of(others)}).value_or("");
  };
  EXPECT_THAT(differ({modules, "checkpoint.partial=[\"**.lora_*\"]"}, a, b), HasSubstr("lora.from_peft = content "));
  EXPECT_EQ(differ({modules}, a, b), "") << "which nobody reads";
  EXPECT_THAT(differ({"mesh.pp=2"}, "pipeline.schedule=1f1b", "pipeline.schedule=gpipe"), HasSubstr("pipeline.schedule = 1f1b on rank 0, gpipe on rank 1"));
}

using ResumedRuns = testing_support::ResumeFixture;

TEST_F(ResumedRuns, AFolderOfCheckpointsIsNoCheckpoint) {
  const testing_support::Layout one{"one", 1, {}};
  run(one, {"run.steps=1", "checkpoint.dir=" + saved(one).string()});
  EXPECT_THAT(testing_support::refusal([&] { open_inputs(settings(one, {"checkpoint.resume=" + saved(one).string()})); }),
              testing::AllOf(HasSubstr("is a folder of checkpoints"), HasSubstr("set checkpoint.resume = " + saved(one, 1).string()),
                             HasSubstr("checkpoint.dir = " + saved(one).string() + " and checkpoint.resume = latest")));
}

/// A Hugging Face folder beside the text, of the shape of ResumeFixture's model, and a tokenizer for it.
class FolderTokenizers : public testing_support::ResumeFixture {
 protected:
  static constexpr int64_t kIds = 275;

  void SetUp() override {
    ResumeFixture::SetUp();
    std::filesystem::create_directory(hf_ = folder_ / "hf");
    write("hf/config.json", R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 300, "max_position_embeddings": 16,
      "rms_norm_eps": 1e-5, "tie_word_embeddings": true})");
    write("run.toml",
          "[model]\nfrom_hf = \"hf\"\n[data]\nfiles = [\"text.txt\"]\nseq_len = 16\ncache_dir = \"cache\"\n[batch]\nglobal_size = 4\n[run]\nsteps = 6\nseed = "
          "3\n");
  }
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  /// False: this build has no SentencePiece.
  bool bring_tokenizer() const {
    try {
      write_lines();  // the text is one line, longer than SentencePiece takes
      data::train_tokenizer({folder_ / "lines.txt"}, kIds, hf_ / "tokenizer.model");
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  }
  Config read(const std::vector<std::string>& sets = {}) const { return read_config(folder_ / "run.toml", sets); }
  static int64_t first_id(const Inputs& inputs) {
    int64_t id = -1;
    inputs.corpus->read(0, 1, &id);
    return id;
  }

  std::filesystem::path hf_;
};

TEST_F(FolderTokenizers, TrainingTakesTheFoldersUnlessOneIsNamed) {
  EXPECT_EQ(read().data.tokenizer, "byte");
  EXPECT_THAT(open_inputs(read()).text_remarks,
              ElementsAre(testing::AllOf(HasSubstr("model.from_hf = "), HasSubstr("brings no tokenizer.model, and the text is read as bytes"))));
  EXPECT_THAT(open_inputs(read({"data.tokenizer=byte"})).text_remarks, IsEmpty()) << "somebody's word";
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  EXPECT_EQ(read().data.tokenizer, (hf_ / "tokenizer.model").string());
  EXPECT_EQ(read({"data.tokenizer=byte"}).data.tokenizer, "byte");
  const Inputs inputs = open_inputs(read());
  EXPECT_EQ(inputs.tokenizer->vocab_size(), kIds);
  EXPECT_THAT(inputs.text_remarks, ElementsAre(HasSubstr("tokenizer.model: is the tokenizer that is taken; data.tokenizer names another")));
  write("saved.toml", to_toml(read()));
  std::filesystem::remove(hf_ / "tokenizer.model");
  EXPECT_EQ(read_config(folder_ / "saved.toml", {}).data.tokenizer, (hf_ / "tokenizer.model").string()) << "a run goes on with the one that it had";
}

/// A saved configuration names the tokenizer of the folder that its run began from, and goes on naming it where another is set.
TEST_F(FolderTokenizers, OneThatIsNotTheFoldersIsSaidToBe) {
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  write("saved.toml", to_toml(read()));
  const auto other = folder_ / "other";
  std::filesystem::copy(hf_, other);
  const auto remarks = [&] { return open_inputs(read_config(folder_ / "saved.toml", {"model.from_hf=" + other.string()})).text_remarks; };
  EXPECT_THAT(remarks(), IsEmpty()) << "of the same content";
  data::train_tokenizer({folder_ / "lines.txt"}, kIds - 3, other / "tokenizer.model");
  EXPECT_THAT(remarks(), ElementsAre(testing::AllOf(HasSubstr("data.tokenizer = " + (hf_ / "tokenizer.model").string() + ": is not the tokenizer that"),
                                                    HasSubstr("name that one with data.tokenizer"), HasSubstr((other / "tokenizer.model").string()))));
  EXPECT_THAT(open_inputs(read_config(folder_ / "saved.toml", {})).text_remarks, IsEmpty());
  EXPECT_THAT(open_inputs(read({"data.tokenizer=byte"})).text_remarks, ElementsAre(HasSubstr("data.tokenizer = byte: is not the tokenizer that")));
}

TEST_F(FolderTokenizers, ATextEndsWhereTheFolderSaysToo) {
  using Ids = std::set<int64_t>;
  const checkpoint::Manifest run;
  const auto ends = [&](const checkpoint::Manifest* saved = nullptr) {
    const Config config = read();
    return text_ends(config, *data::Tokenizer::load(config.data.tokenizer), saved);
  };
  EXPECT_EQ(ends().ids, Ids{}) << "bytes have no end";
  write("hf/generation_config.json", R"({"eos_token_id": 299})");
  EXPECT_EQ(ends().ids, Ids{299});
  EXPECT_THAT(ends().remarks, IsEmpty());
  write("hf/generation_config.json", R"({"eos_token_id": "two"})");
  EXPECT_THAT(testing_support::refusal([&] { ends(); }), HasSubstr("generation_config.json: eos_token_id = \"two\" is of the wrong type"));
  EXPECT_EQ(ends(&run).ids, Ids{}) << "what the folder of a run says by now is no reason to refuse its checkpoint";
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  write("hf/generation_config.json", R"({"eos_token_id": [298, 275]})");
  for (const auto* saved : {static_cast<const checkpoint::Manifest*>(nullptr), &run}) EXPECT_EQ(ends(saved).ids, (Ids{2, 275, 298}));
  EXPECT_THAT(ends().remarks, IsEmpty());
  write("hf/added_tokens.json", R"({"<|im_start|>": 276, "<|im_end|>": 275, "</s>": 2})");
  write("hf/tokenizer_config.json",
        R"({"added_tokens_decoder": {"0": {"content": "<unk>"}, "276": {"content": "<|im_start|>"}, "277": {"content": "<pad>"}}})");
  EXPECT_THAT(ends().remarks, ElementsAre(testing::AllOf(HasSubstr("beyond the 275 of its tokenizer.model (275 <|im_end|>, 276 <|im_start|>, 277 <pad>)"),
                                                         HasSubstr("no prompt can spell them"))));
  EXPECT_EQ(text_ends(read(), *data::Tokenizer::load("byte"), nullptr).ids, Ids{}) << "by another tokenizer, the folder's ids stand for other text";
  std::filesystem::remove_all(hf_);
  Config gone = config("llama");
  gone.model.from_hf = hf_.string();
  EXPECT_EQ(text_ends(gone, *data::Tokenizer::load("byte"), &run).ids, Ids{});
}

/// As transformers 5 saves a folder, and as GPT-2's and LLaMA 3's are: the vocabulary comes as JSON alone, which is not read for ids, but tells whose they are.
TEST_F(FolderTokenizers, OneAsJsonIsAnotherWhereAPieceHasAnotherId) {
  using Ids = std::set<int64_t>;
  write("hf/generation_config.json", R"({"eos_token_id": [2, 298]})");
  const auto ends = [&](const std::string& tokenizer) { return text_ends(read(), *data::Tokenizer::load(tokenizer), nullptr).ids; };
  const auto bring = [&](const std::string& vocabulary) {
    write("hf/tokenizer.json", R"({"model": {"vocab": {)" + vocabulary + R"(}}, "added_tokens": [{"id": 275, "content": "<|im_end|>"}]})");
  };
  EXPECT_EQ(ends("byte"), (Ids{2, 298})) << "the folder brings none";
  for (const std::string name : {"hf/vocab.json", "hf/tokenizer.json", "hf/tokenizer.model"}) {
    write(name, "version https://git-lfs");
    EXPECT_EQ(ends("byte"), Ids{}) << "whatever it is, bytes are another";
    EXPECT_EQ(folders_other_tokenizer(read(), std::string("byte")), folder_ / name);
  }
  std::filesystem::remove(hf_ / "tokenizer.model");
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  const std::string model = (folder_ / "named.model").string();
  std::filesystem::rename(hf_ / "tokenizer.model", model);
  const auto remarks = [&] { return open_inputs(read({"data.tokenizer=" + model})).text_remarks; };
  EXPECT_EQ(ends(model), (Ids{2, 298})) << "which cannot be read";
  write("hf/tokenizer_config.json", R"({"add_eos_token": true})");
  const std::string specials = R"("<unk>": 0, "<s>": 1, "</s>": 2, "<0x00>": 3)";
  bring(specials);
  EXPECT_EQ(ends(model), (Ids{2, 298})) << "what is added beyond is no difference";
  EXPECT_THAT(remarks(), ElementsAre(HasSubstr("puts an id behind a text, too")));
  EXPECT_EQ(folders_other_tokenizer(read(), data::Tokenizer::load(model)->fingerprint()), hf_ / "tokenizer.json") << "of one that is gone nobody can tell";
  for (const std::string other : {R"("th": 2)", R"("</s>": 275)", R"("no such piece": 4)"}) {
    bring(specials.substr(0, 20) + ", " + other);
    EXPECT_EQ(ends(model), Ids{2}) << other;
    EXPECT_THAT(remarks(), ElementsAre(testing::AllOf(HasSubstr("data.tokenizer = " + model + ": is not the tokenizer that model.from_hf brings, "),
                                                      HasSubstr("tokenizer.json, by which"), HasSubstr("name the same vocabulary as a tokenizer.model"))));
  }
  write("hf/tokenizer.model", "version https://git-lfs");
  EXPECT_EQ(ends(model), Ids{2}) << "of two files the one that can be read tells";
}

TEST_F(FolderTokenizers, DocumentsBeginAsTheFolderSaysUnlessSomebodyDoes) {
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  const auto of_folder = [&] { return find_model({.from_hf = hf_, .checkpoint = {}}, {}); };
  EXPECT_FALSE(open_inputs(read()).corpus->bos());
  EXPECT_FALSE(find_tokenizer(of_folder(), "").bos);
  EXPECT_EQ(first_id(open_inputs(read({"data.bos=true"}))), 1);
  write("hf/tokenizer_config.json", R"({"tokenizer_class": "LlamaTokenizer"})");
  const Inputs inputs = open_inputs(read());
  EXPECT_EQ(first_id(inputs), 1);
  EXPECT_THAT(inputs.text_remarks, testing::Contains(HasSubstr("tokenizer_config.json: puts id 1 in front of a text")));
  EXPECT_EQ(data_identity(*inputs.corpus).at("bos"), true);
  EXPECT_NE(first_id(open_inputs(read({"data.bos=false"}))), 1);
  EXPECT_TRUE(find_tokenizer(of_folder(), "").bos);
  EXPECT_FALSE(find_tokenizer(of_folder(), "byte").bos) << "which has none";
  EXPECT_THAT(testing_support::refusal([&] { open_inputs(read({"data.bos=true", "data.tokenizer=byte"})); }),
              testing::AllOf(HasSubstr("data.bos = true: the tokenizer (byte) has no beginning-of-text id"), HasSubstr("data.bos = false")));
}

/// As transformers 5 saves a folder: the rule lies in tokenizer.json alone.
TEST_F(FolderTokenizers, DocumentsBeginAsThePostProcessorSays) {
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  const auto bos = [&](const std::string& single) {
    write("hf/tokenizer.json", R"({"post_processor": {"type": "TemplateProcessing", "single": [)" + single +
                                   R"({"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [1]}, "[B]": {"ids": [275]}}}})");
    return open_inputs(read());
  };
  write("hf/tokenizer_config.json", R"({"tokenizer_class": "TokenizersBackend", "bos_token": "<s>"})");
  const Inputs begun = bos(R"({"SpecialToken": {"id": "<s>"}}, )");
  EXPECT_EQ(first_id(begun), 1);
  EXPECT_THAT(begun.text_remarks, testing::Contains(HasSubstr("tokenizer.json: puts id 1 in front of a text")));
  EXPECT_THAT(testing_support::refusal([&] { bos(R"({"SpecialToken": {"id": "[B]"}}, )"); }),
              HasSubstr("tokenizer.json: puts '[B]' in front of a text, id 275"));
  write("hf/tokenizer_config.json", R"({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"})");
  const Inputs plain = bos("");
  EXPECT_FALSE(plain.corpus->bos());
  EXPECT_THAT(plain.text_remarks, testing::Contains(HasSubstr("tokenizer.json: its post_processor puts no id")));
}

TEST_F(FolderTokenizers, OnlyTheTokenizersOwnIdIsPutInFrontOfAText) {
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  const auto open = [&](const std::string& more, const std::vector<std::string>& sets = {}) {
    write("hf/tokenizer_config.json", R"({"add_bos_token": true, )" + more + "}");
    return open_inputs(read(sets));
  };
  EXPECT_EQ(first_id(open(R"("bos_token": "<s>")")), 1);
  EXPECT_EQ(first_id(open(R"("bos_token": "[B]", "added_tokens_decoder": {"1": {"content": "[B]"}})")), 1) << "another name of it";
  const auto refused = [&](const std::string& more) { return testing_support::refusal([&] { open(more); }); };
  EXPECT_THAT(refused(R"("bos_token": "</s>")"), testing::AllOf(HasSubstr("tokenizer_config.json: puts '</s>' in front of a text, id 2, and only"),
                                                                HasSubstr("id 1, can be put there; data.bos = true puts that one")));
  EXPECT_THAT(refused(R"("bos_token": {"content": "e"})"), HasSubstr("puts 'e' in front of a text, id "));
  EXPECT_THAT(refused(R"("bos_token": "[none]")"), HasSubstr("puts '[none]' in front of a text, which is no piece of the tokenizer"));
  EXPECT_THAT(refused(R"("bos_token": "[B]", "added_tokens_decoder": {"275": {"content": "[B]"}})"), HasSubstr("puts '[B]' in front of a text, id 275"));
  EXPECT_EQ(first_id(open(R"("bos_token": "</s>")", {"data.bos=true"})), 1);
  EXPECT_NE(first_id(open(R"("bos_token": "</s>")", {"data.bos=false"})), 1);
  const Inputs none = open(R"("bos_token": null)");
  EXPECT_FALSE(none.corpus->bos());
  EXPECT_THAT(none.text_remarks, testing::Contains(HasSubstr("bos_token = null")));

  const std::string behind = "puts an id behind a text, too";
  EXPECT_THAT(open(R"("add_eos_token": true)").text_remarks, testing::Contains(HasSubstr(behind)));
  EXPECT_THAT(open(R"("add_eos_token": false)").text_remarks, testing::Not(testing::Contains(HasSubstr(behind))));
  EXPECT_THAT(open(R"("add_eos_token": true, "eos_token": "</s>")").text_remarks, testing::Contains(HasSubstr(behind)));
  EXPECT_THAT(open(R"("add_eos_token": true, "eos_token": "[E]", "added_tokens_decoder": {"280": {"content": "[E]"}})").text_remarks,
              testing::Contains(testing::AllOf(HasSubstr("puts '[E]', id 280, behind a text, too; here the tokenizer's own for the end of one, id 2, stands"),
                                               HasSubstr("data.documents"))));
  EXPECT_THAT(open(R"("add_eos_token": true, "eos_token": "[none]")").text_remarks, testing::Contains(HasSubstr("puts '[none]' behind a text, too; here the")));
  std::filesystem::rename(hf_ / "tokenizer.model", folder_ / "other.model");
  data::train_tokenizer({folder_ / "lines.txt"}, kIds - 3, hf_ / "tokenizer.model");
  EXPECT_EQ(first_id(open(R"("bos_token": "</s>")", {"data.tokenizer=" + (folder_ / "other.model").string()})), 1) << "of another tokenizer it says nothing";
}

/// Ranks on several hosts read a folder each, and one may lack it.
TEST_F(FolderTokenizers, AllRanksEndATextWhereRank0Does) {
  comm::run_ranks(3, [](comm::World& world) {
    TextEnds ends;
    if (world.rank() == 0) ends.ids = {2, 32007};
    if (world.rank() == 2) ends.ids = {2, 5, 6};
    take_ends_of_rank_0(ends, world.group());
    EXPECT_EQ(ends.ids, (std::set<int64_t>{2, 32007}));
  });
}

TEST_F(FolderTokenizers, ACheckpointIsGoneOnFromAndReadAsItWasWritten) {
  if (!bring_tokenizer()) GTEST_SKIP() << "no SentencePiece";
  const auto saved_with = [&](const std::string& name, const std::string& tokenizer, const testing_support::Sets& more) {
    testing_support::Sets sets{"model.vocab_size=300", "run.steps=2", "data.tokenizer=" + tokenizer, "checkpoint.dir=" + (folder_ / name).string()};
    sets.insert(sets.end(), more.begin(), more.end());
    run({"one", 1, {}}, sets);
    return folder_ / name / step_name(2);
  };
  const std::string model = (hf_ / "tokenizer.model").string();
  const auto plain = saved_with("plain", model, {}), begun = saved_with("begun", model, {"data.bos=true"}), bytes = saved_with("bytes", "byte", {});
  write("hf/tokenizer_config.json", R"({"add_bos_token": true})");
  const auto go_on = [&](const std::filesystem::path& from, const std::vector<std::string>& more = {}) {
    std::vector<std::string> sets{"checkpoint.resume=" + from.string()};
    sets.insert(sets.end(), more.begin(), more.end());
    return open_inputs(read(sets));
  };
  EXPECT_FALSE(go_on(plain).corpus->bos()) << "whatever the folder says by now";
  EXPECT_TRUE(go_on(begun).corpus->bos());
  EXPECT_THAT(testing_support::refusal([&] { go_on(plain, {"data.bos=true"}); }), HasSubstr("data.bos = true: " + plain.string() + " was written with false"));
  EXPECT_THAT(testing_support::refusal([&] { go_on(bytes); }),
              testing::AllOf(HasSubstr("data.tokenizer is not given, and by model.from_hf it is " + model), HasSubstr("set data.tokenizer = byte")));
  EXPECT_EQ(go_on(bytes, {"data.tokenizer=byte"}).resume->manifest.step, 2);
  for (const auto& [from, bos] : {std::pair(plain, false), {begun, true}, {bytes, false}}) {
    EXPECT_EQ(find_tokenizer(find_model({.from_hf = {}, .checkpoint = from}, {}), "").bos, bos) << from;
  }
}

}  // namespace
}  // namespace tessera
