#include "tessera/launch/run_options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>
#include <string_view>

#include "tessera/comm/decorators/inject.h"
#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

constexpr int c10d_port = 29400;
constexpr int static_port = 29500;
constexpr int largest_port = 65535;

const std::vector<Flag>& table() {
  static const std::vector<Flag> flags{
      {"nnodes", "MIN[:MAX]", "Nodes of the job; a range makes it elastic (1)"},
      {"nproc-per-node", "N", "Ranks on this node: a number, cpu, gpu, or auto (1)"},
      {"rdzv-endpoint", "HOST:PORT", "Where agents meet (port 29400); the one whose host it is serves it"},
      {"rdzv-id", "ID", "Name of the job at that endpoint (none)"},
      {"rdzv-backend", "NAME", "c10d, or static for --node-rank and --master-addr"},
      {"rdzv-conf", "K=V,...", "join_timeout (600), last_call_timeout (3), keep_alive_interval (0.5), keep_alive_max_attempt (10), is_host"},
      {"standalone", "", "One node, on a free port; other rendezvous flags say nothing"},
      {"max-restarts", "N", "Failures after which the ranks are started again (0)"},
      {"monitor-interval", "SECONDS", "Between looks at the ranks (0.1)"},
      {"node-rank", "N", "static: this node's place among the nodes (0)"},
      {"master-addr", "HOST", "static: address of node 0 (127.0.0.1)"},
      {"master-port", "PORT", "static: a free port of node 0 (29500)"},
      {"local-addr", "HOST", "Under which other nodes reach this one (that of its connection)"},
      {"role", "NAME", "ROLE_NAME of the ranks, and their prefix with --tee (default)"},
      {"log-dir", "DIR", "Keep what each rank writes in DIR/ID/attempt_N/RANK/stdout.log and stderr.log"},
      {"redirects", "WHICH", "To those files only: 1 stdout, 2 stderr, 3 both; 0:3,1:2 by local rank (0)", 'r'},
      {"tee", "WHICH", "To those files and, with a prefix, to the console (0)", 't'},
      {"local-ranks-filter", "N,...", "Show only these local ranks on the console (all)"},
      {"prefix", "", "Begin each line on the console with its rank"},
      {"module", "", "PROGRAM is a Python module", 'm'},
      {"no-python", "", "Start PROGRAM itself, whatever its name"},
      {"start-method", "NAME", "spawn, fork or forkserver: says nothing for programs, as with torchrun"},
      {"shutdown-timeout", "SECONDS", "From asking ranks to end to ending them (30)", 0, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"},
      {"grace", "SECONDS", "The same"},
      {"inject", "FAULT", "What is to go wrong: rank=1,op=all_reduce,count=40,do=kill", 0, "TESSERA_INJECT"},
      {"help", "", "Print this", 'h'},
  };
  return flags;
}

constexpr std::array<std::string_view, 9> torchrun_only{"--run-path",   "--event-log-handler", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
                                                        "--logs-specs", "--numa-binding",      "--signals-to-handle",        "--virtual-local-rank",
                                                        "--use-env"};

void refuse_what_only_torchrun_has(const std::vector<std::string>& arguments) {
  for (std::string argument : arguments) {
    if (!argument.starts_with("--") || argument == "--") return;  // good enough: a value before it only spares a better message
    argument = argument.substr(0, argument.find('='));
    std::ranges::replace(argument, '_', '-');
    require(std::ranges::find(torchrun_only, argument) == torchrun_only.end(), argument, ": torchrun has this flag, tessera run does not; leave it out");
  }
}

std::pair<int, int> parse_nnodes(const std::string& text) {
  const auto number = [&](const std::string& part) {
    int value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    require(!part.empty() && error == std::errc() && end == part.data() + part.size() && value >= 1, "--nnodes = ", text,
            ": N or MIN:MAX, whole numbers of at least 1, as in --nnodes=1:4");
    return value;
  };
  const size_t colon = text.find(':');
  const int low = number(text.substr(0, colon));
  const int high = colon == std::string::npos ? low : number(text.substr(colon + 1));
  require(low <= high, "--nnodes = ", text, ": MIN must not exceed MAX");
  return {low, high};
}

int parse_nproc(const std::string& text, const Devices& devices) {
  if (text == "cpu") return devices.cpus;
  if (text == "auto") return devices.gpus > 0 ? devices.gpus : devices.cpus;
  if (text == "gpu") {
    require(devices.gpus > 0, "--nproc-per-node = gpu: this build of torch sees no GPU here; give a number, or cpu");
    return devices.gpus;
  }
  constexpr int most = 1 << 16;  // processes of one node; the rendezvous takes no more than 2^20 of all
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(!text.empty() && error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= most, "--nproc-per-node = ", text,
          ": a whole number of at least 1 and at most ", most, ", auto, cpu or gpu");
  return value;
}

/// "a=1,b=2" as flags.
FlagValues parse_conf(const std::string& text) {
  const std::vector<std::string> known{"join_timeout",           "timeout", "last_call_timeout", "close_timeout", "read_timeout", "keep_alive_interval",
                                       "keep_alive_max_attempt", "is_host", "store_type"};
  FlagValues conf;
  conf.before_names = "--rdzv-conf ";
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t equals = entry.find('=');
    const std::string key = detail::trimmed(entry.substr(0, equals)), value = equals == std::string::npos ? "" : detail::trimmed(entry.substr(equals + 1));
    require(!value.empty(), "--rdzv-conf = ", text, ": KEY=VALUE,...");
    require(std::ranges::find(known, key) != known.end(), "--rdzv-conf ", key, ": no such key; the nearest is ", nearest(key, known));
    conf.values.emplace_back(key, value);
  }
  return conf;
}

void read_conf(const std::string& text, AgentOptions& options) {
  const FlagValues conf = parse_conf(text);
  RendezvousOptions& rendezvous = options.rendezvous;
  rendezvous.rules.join_timeout_s = conf.seconds("join_timeout", conf.seconds("timeout", rendezvous.rules.join_timeout_s));
  rendezvous.rules.last_call_s = conf.seconds("last_call_timeout", rendezvous.rules.last_call_s);
  options.heartbeat_s = conf.seconds("keep_alive_interval", options.heartbeat_s);
  require(options.heartbeat_s >= 0.05, "--rdzv-conf keep_alive_interval = ", options.heartbeat_s, ": seconds, at least 0.05");
  rendezvous.rules.dead_after_s = options.heartbeat_s * conf.number("keep_alive_max_attempt", 2, 10);
  if (const auto store = conf.text("store_type")) require(*store == "tcp", "--rdzv-conf store_type = ", *store, ": only tcp");
  if (auto is_host = conf.text("is_host")) {
    std::ranges::transform(*is_host, is_host->begin(), [](unsigned char c) { return std::tolower(c); });
    const bool yes = *is_host == "1" || *is_host == "true" || *is_host == "t" || *is_host == "yes" || *is_host == "y";
    const bool no = *is_host == "0" || *is_host == "false" || *is_host == "f" || *is_host == "no" || *is_host == "n";
    require(yes || no, "--rdzv-conf is_host = ", *is_host, ": true or false");
    rendezvous.serves = yes;
  }
}

void read_place(const FlagValues& flags, AgentOptions& options) {
  RendezvousOptions& rendezvous = options.rendezvous;
  const auto& [low, high] = std::tie(rendezvous.rules.min_nodes, rendezvous.rules.max_nodes);
  if (flags.given("standalone")) {
    require(high == 1, "--standalone: one node, but --nnodes = ", low, ":", high, "; leave one of the two out");
    return;
  }
  const bool names_master = flags.given("node-rank") || flags.given("master-addr") || flags.given("master-port");
  const auto endpoint = flags.text("rdzv-endpoint");
  const std::string backend = flags.text("rdzv-backend").value_or(endpoint && !names_master ? "c10d" : "static");
  require(backend == "c10d" || backend == "static", "--rdzv-backend = ", backend, ": c10d or static");
  if (backend == "c10d") {
    require(endpoint || high == 1, "--rdzv-endpoint is missing: with --rdzv-backend=c10d and --nnodes = ", high,
            " agents must know where to meet; give HOST:PORT");
    if (!endpoint) return;
    const comm::Endpoint place = comm::parse_endpoint(*endpoint, "--rdzv-endpoint", c10d_port);
    require(place.port != 0 || high == 1, "--rdzv-endpoint = ", *endpoint, ": other nodes cannot find a port that is chosen here; give one that is free");
    if (place.port != 0) rendezvous.endpoint = place;
    return;
  }
  require(low == high, "--nnodes = ", low, ":", high, ": a static rendezvous cannot grow or shrink; give one number, or --rdzv-backend=c10d");
  if (high == 1 && !endpoint && !flags.given("master-port") && !flags.given("master-addr")) return;
  rendezvous.node_rank = flags.number("node-rank", 0, 0);
  require(rendezvous.node_rank < high, "--node-rank = ", rendezvous.node_rank, ": less than --nnodes = ", high);
  const int port = flags.number("master-port", 1, static_port);
  require(port <= largest_port, "--master-port = ", port, ": a port, 1 to ", largest_port, "; give one that is free");
  const auto master = comm::parse_endpoint(flags.text("master-addr").value_or("127.0.0.1"), "--master-addr", port);
  rendezvous.endpoint = endpoint ? comm::parse_endpoint(*endpoint, "--rdzv-endpoint", port) : master;
  options.master_is_rendezvous = true;
}

void read_output(const FlagValues& flags, AgentOptions& options) {
  OutputOptions& output = options.job.output;
  output.redirects = StreamChoice(flags.text("redirects").value_or("0"), "--redirects");
  output.tee = StreamChoice(flags.text("tee").value_or("0"), "--tee");
  output.keep_all = flags.given("log-dir") && !flags.given("redirects") && !flags.given("tee");
  if (flags.given("prefix")) output.prefix = Prefix::Rank;
  if (const auto log_dir = flags.text("log-dir")) {
    require(!log_dir->empty(), "--log-dir is empty: name a folder");
    const std::string& id = options.job.run_id;
    require(!id.empty() && id != "." && id != ".." && id.find('/') == std::string::npos, "--rdzv-id = ", id,
            ": with --log-dir it names a folder there, so it must be a plain file name, without '/'; give another ID, or leave --log-dir out");
    output.folder = *log_dir + "/" + options.job.run_id;
  }
  require(!output.folder.empty() || !(flags.given("redirects") || flags.given("tee")) ||
              (flags.text("redirects").value_or("0") == "0" && flags.text("tee").value_or("0") == "0"),
          "--redirects and --tee write files: say where with --log-dir=DIR");
  std::istringstream ranks(flags.text("local-ranks-filter").value_or(""));
  for (std::string rank; std::getline(ranks, rank, ',');) {
    FlagValues one;
    one.values.emplace_back("local-ranks-filter", rank);
    const int shown = one.number("local-ranks-filter", 0, 0), ranks = options.rendezvous.nproc;
    require(shown < ranks, "--local-ranks-filter = ", rank, ": this node has ", ranks, ranks == 1 ? " rank, 0" : " ranks, numbered from 0",
            "; name one of them");
    output.shown.insert(shown);
  }
}

std::vector<std::string> command_of(const FlagValues& flags, const Lookup& environment) {
  require(!flags.rest.empty(), "no program: name one after the flags, as in tessera run --nproc-per-node 2 train.py");
  const bool module = flags.given("module"), no_python = flags.given("no-python");
  require(!module || !no_python, "--module and --no-python contradict each other: a module is run by Python");
  std::vector<std::string> command;
  if (module || (!no_python && flags.rest.front().ends_with(".py"))) {
    command = {environment("PYTHON_EXEC").value_or("python3"), "-u"};
    if (module) command.emplace_back("-m");
  }
  command.insert(command.end(), flags.rest.begin(), flags.rest.end());
  return command;
}

}  // namespace

AgentOptions parse_run(const std::vector<std::string>& arguments, const Lookup& environment, const Devices& devices) {
  refuse_what_only_torchrun_has(arguments);
  const FlagValues flags = parse_flags(table(), arguments, environment);
  AgentOptions options;
  options.talkative = true;
  RendezvousOptions& rendezvous = options.rendezvous;
  std::tie(rendezvous.rules.min_nodes, rendezvous.rules.max_nodes) = parse_nnodes(flags.text("nnodes").value_or("1"));
  rendezvous.nproc = parse_nproc(flags.text("nproc-per-node").value_or("1"), devices);
  rendezvous.rules.max_restarts = options.job.max_restarts = flags.number("max-restarts", 0, 0);
  rendezvous.local_address = flags.text("local-addr").value_or("");
  rendezvous.run_id = options.job.run_id = flags.text("rdzv-id").value_or("none");
  options.job.role = flags.text("role").value_or("default");
  options.monitor_s = std::max(0.01, flags.seconds("monitor-interval", 0.1));
  options.grace_s = flags.seconds("grace", flags.seconds("shutdown-timeout", 30));
  const std::string method = flags.text("start-method").value_or("spawn");
  require(method == "spawn" || method == "fork" || method == "forkserver", "--start-method = ", method, ": spawn, fork or forkserver");
  read_conf(flags.text("rdzv-conf").value_or(""), options);
  read_place(flags, options);
  read_output(flags, options);
  options.job.command = command_of(flags, environment);
  if (const auto faults = flags.text("inject"); faults && !faults->empty()) {
    // More nodes may have more ranks each, or come and go.
    rendezvous.rules.max_nodes == 1 ? comm::parse_faults(*faults, rendezvous.nproc, 0) : comm::parse_faults(*faults);
    options.job.variables["TESSERA_INJECT"] = *faults;
  }
  return options;
}

std::string describe_run() {
  return "Start ranks on this and other machines, again after failures, and say what went wrong\n\n"
         "tessera run [FLAGS] [--] PROGRAM [ARGUMENTS]\n\n"
         "A PROGRAM that ends in .py is run by Python. Flags, underscore spellings and PET_ variables are torchrun's.\n\n" +
         describe_flags(table());
}

}  // namespace tessera::launch
