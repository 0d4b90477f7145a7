#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/data/tokenizer.h"
#include "tessera/train/found_tokenizer.h"
#include "tessera/train/load_model.h"

/// What `eval` and `generate` share beside the weights.
namespace tessera {

/// The tokenizer `flag` names, or else the one that the model was trained with, of a Hugging Face folder its tokenizer.model: ids mean nothing by another.
/// Bytes where such a folder has none, which a remark says unless the vocabulary is that of bytes. A file that has changed since the checkpoint was written is
/// refused, as `train` does; one that somebody names, by the flag or --set, is taken and remarked. A text begins as those that it was trained with. Throws
/// ConfigError.
FoundTokenizer find_tokenizer(const FoundModel& model, const std::string& flag);

/// Windows of a forward pass where nobody says how many: 1, or, where experts choose among its tokens, as many as where the model was trained.
int64_t windows_of_a_pass(const FoundModel& model);

/// What all ranks that read a model must have alike (check_ranks_agree), by content where paths name it: settings, schedule, checkpoint or weights, what begins
/// beside them, tokenizer.
Settings reading_settings(const FoundModel& model, const FoundTokenizer& found);

/// What there is to say before a model is read, once for all ranks: checkpoints that were passed over, what checkpoint.partial lets begin anew, folders of the
/// run that do not hold it, settings that make another model than was trained (what a resumed run is refused for), settings without effect; refuses values
/// among the latter that no run takes. Throws ConfigError.
std::vector<std::string> reading_remarks(const FoundModel& model, const std::vector<std::string>& sets);

}  // namespace tessera
