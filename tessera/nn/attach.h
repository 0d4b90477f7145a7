#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/attachment.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// Puts `interceptor` around every further call of `module`: outside what is attached already. What is returned detaches it when it dies, in any
/// order with others; the module may die first. Calls under way keep the chain they began with.
[[nodiscard]] Attachment attach(Module& module, std::shared_ptr<Interceptor> interceptor);

/// Said by an interceptor that reads the parameters of `module` ahead of its call, which follows.
void announce_use(Module& module);

/// Attaches to each module under `root` whose path matches; lists of modules, which are never called, are passed over. Throws ConfigError where none does
/// (naming the nearest path) and where one that does cannot be intercepted because it is a plain torch::nn::Module.
[[nodiscard]] Attachment attach(torch::nn::Module& root, const std::string& pattern, std::shared_ptr<Interceptor> interceptor);

/// The same with one interceptor for each module, made by `make`.
using InterceptorFactory = std::function<std::shared_ptr<Interceptor>(Module&)>;
[[nodiscard]] Attachment attach(torch::nn::Module& root, const std::string& pattern, const InterceptorFactory& make);

/// The handle of a module; of one that nobody owns (`Net model;`, on the stack: below it every module has an owner), one that owns nothing either.
/// What walks a model uses this, or torch's `apply`, in place of shared_from_this, named_modules and modules, which throw there.
std::shared_ptr<torch::nn::Module> share(torch::nn::Module& module);

/// Whether `path` matches: '*' stands for any text within one component, '**' for any number of components, also none.
bool matches(std::string_view pattern, std::string_view path);

/// Modules under `root` (itself excluded unless the pattern is empty) whose path matches, in the order of registration. Throws ConfigError
/// naming the nearest path where there are none.
std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules_matching(torch::nn::Module& root, const std::string& pattern);

/// The same, of those that can be intercepted: lists of modules, which are never called, are passed over. Throws ConfigError, besides, for a match that is a
/// plain torch::nn::Module.
std::vector<std::pair<std::string, std::shared_ptr<Module>>> interceptable_modules(torch::nn::Module& root, const std::string& pattern);

/// Tells every nn::Module under `root` its path, and every parameter its logical name (see slice_of). Names that are set already stay, so a
/// part of a model keeps the names it has in the whole; but those that a part was given when it was wrapped alone are made whole (whole_name).
void assign_paths(torch::nn::Module& root, const std::string& prefix = "");

/// Refuses modules of ours inside torch::nn::Sequential, which would call their forward directly and pass by every interceptor.
/// Throws ConfigError naming the path and nn::Sequential.
void check_no_bypass(torch::nn::Module& root);

}  // namespace tessera::nn
