# The rooms' tests on the simulated accelerator: one process a room, with what is left out and why. `only` instead of it where few of a room's tests have tensors.
# ALSO_PRIVATE: once more under the keys of accelerators that libtorch does not know (TESSERA_TEST_DEVICE=sim_private). ALSO_KERNELS: once more with CUDA's own
# kernels (sim_kernels).
function(tessera_sim_suite room)
  cmake_parse_arguments(SUITE "ALSO_PRIVATE;ALSO_KERNELS" "" "ONLY;LEFT_OUT" ${ARGN})
  if(NOT SUITE_ONLY)
    set(SUITE_ONLY *)
  endif()
  list(JOIN SUITE_ONLY : only)
  list(JOIN SUITE_LEFT_OUT : left_out)
  set(devices sim)
  if(SUITE_ALSO_PRIVATE)
    list(APPEND devices sim_private)
  endif()
  if(SUITE_ALSO_KERNELS)
    list(APPEND devices sim_kernels)
  endif()
  foreach(device ${devices})
    add_test(NAME ${room}.${device} COMMAND tessera_${room}_test "--gtest_filter=${only}-${left_out}")
    set_tests_properties(${room}.${device} PROPERTIES LABELS "unit;sim" TIMEOUT 600 ENVIRONMENT "OMP_NUM_THREADS=1;TESSERA_TEST_DEVICE=${device}")
  endforeach()
endfunction()

tessera_sim_suite(memory ALSO_PRIVATE LEFT_OUT
  MemoryLimit.PassesThroughOperatorsAndBackward HostCache.*   # the CPU's allocator
  HostLink.*)                                                 # has a device of its own
# Of comm, what moves tensors; the rest are processes, times and files.
tessera_sim_suite(comm ALSO_PRIVATE ONLY Collectives* *Collectives* Differentiable* *Differentiable* *Execute* Gloo.* Shm.* TwoLevel.*
                  LEFT_OUT Inject.* CollectivesRefuse.*   # which write what the device cannot be written by: from the host
                  *TwoLevel.AsynchronousCollectives* *TwoLevel.MessagesBeside*)  # ranks of hosts that are pretended, in one process
tessera_sim_suite(nn LEFT_OUT
  GradientDispatcher.GradientsAreAddedInPlaceWhereNobodyWantsToSeeEach Layers.EmbeddingAndLayerNormAreTorchs  # on CUDA autograd adds up gradients itself
  OnMetaTest.BuildsPlainModulesWithoutMemory                  # says that without a device tensors are on the CPU
  AmbientTest.AScopeInsideAPassIsNotUndoneByOneFurtherIn      # that backward stays on its thread, as it does there
  Materialize.KeepsHandlesHooksAndWorksForPlainModules
  Materialize.ATableMayBeMadeByOperatorsThatCountOnTheHost    # compares with tables that were made on the CPU
  ContrastiveLoss.EqualsTheWholeBatchOnOneDevice)             # hands a group tensors of another rank's device
tessera_sim_suite(kernels ALSO_KERNELS LEFT_OUT
  Half.* WidenedProducts.*          # what a CPU without such products does
  *Fp8*                             # on CUDA sizes are multiples of 16
  Loops.* Panels.* AdamWKernel.*    # the CPU's loops by their pointers
  QuantizedLinear.*                 # refused on devices, by name
  Memory.LinearCrossEntropyNeverHoldsAllLogits LinearCrossEntropy.WeightGradientIsAddedToWhatIsThere LinearCrossEntropy.GradientsOfTheBackwardPassHaveTheSameBits)
tessera_sim_suite(optim LEFT_OUT *InParts.IsTheWhole* GlobalNorm.MeetsOverRanksThatHoldSlices GlobalNorm.CountsReplicatedSlicesOnce  # tensors of another rank's device
                  Muon.RoundsDoNotShowInTheBits                              # the same
                  *StochasticOptimizer* RoundedState.*)       # refused on CUDA, by name
tessera_sim_suite(offload LEFT_OUT
                  OffloadActivations.AChangeInPlaceIsRefusedAsWithoutThem)  # a program that is refused once it has written what is on its way
tessera_sim_suite(precision LEFT_OUT
                  Policy.NormsAndTheResidualStreamAreFp32UnderSixteenBitWeights)  # fp16 on a CPU
tessera_sim_suite(recompute LEFT_OUT
  RecomputeState.Autocast* RecomputeState.DrawsTheSameRandomNumbersAndGoesOnAsWithout  # the CPU's autocast and generator
  Selective.RecomputesTheAttentionCoresAlone Selective.KeptOperatorsDoNotRunAgain Selective.KeepsNothingThatAKernelCallsInside
  MeasureRecompute.CountsBytesSavedAndFlopsOnceEachAlsoOnMeta  # attention by other operators
  Recompute.ASecondPassLeavesNoMoreThanBackwardNeeds)
tessera_sim_suite(data_parallel ALSO_PRIVATE LEFT_OUT
  DdpPlaces.AreTakenByTheFirstGradientAndNotCopied             # on CUDA autograd adds up gradients itself
  OrthonormalizeRows.*                                         # on CUDA by libtorch's QR
  TreePlainLoop.AParameterThatGetsAnotherFormWithinARunIsRefused PowerSgd.ADryRunMakesTheSameCalls)   # name the CPU
tessera_sim_suite(zero ALSO_PRIVATE LEFT_OUT
  ZeroGradients.OvertakingOneThatIsComputedInPlaceAreThoseOfTheStep  # a program that is refused once it has written what is on its way
  ZeroPlainLoop.PartsThatWereNotBroughtTogetherAreNoticed ZeroPlainLoop.ZerosAreAGradientOfWhatNobodyUses  # writes are seen on the CPU alone
  ZeroPlainLoop.WeightsMayBeLoadedAfterWrapping                      # loads another rank's tensors
  ZeroPlainLoop.AWrapperThatGoesInTheMiddleOfAStepWaitsForNobody)    # holds seconds
tessera_sim_suite(tensor_parallel LEFT_OUT
  LayoutRules.FeaturesAreFollowed LayoutRules.PositionsAreFollowed TensorParallel.PaddingIsTheRowOfTheWholeVocabulary
  *VocabularyHead.SmoothsAndBoundsLogitsAsOneDeviceDoes* VocabularyHeads.UnevenPartsMeetEquallyOften RandomPlans.*  # tensors of another rank's device
  *VocabularyHead.PlainOperatorsMeetAsTheFusedOneDoes* *WorldSizes.MasksOfASequenceWithoutABatchAreThoseOfOneDevice* OwnLoopOfParts.Masks*
  OwnLoopOfParts.TheStreamIsNot* OwnLoopOfParts.Repeated* OwnLoopOfParts.WeightsOfAttention* OwnLoopOfParts.OneRanksPartsOfUnknown*
  VocabularyHeads.AnIdThatIsInNoVocabularyIsRefused                  # a device would have to be waited for
  Overlap.WhatAProductHidesIsOnItsWayWhenItBegins VocabularyHeads.EvaluationIsThePlainCrossEntropy)
tessera_sim_suite(context_parallel)
tessera_sim_suite(expert_parallel ALSO_KERNELS LEFT_OUT ExchangePicture.*                # reads counts by their pointer
                  ExpertParallel.ComputesEachRanksRowsByThemselves)       # the same bits, of MKL, whose operands are aligned on a CPU alone
tessera_sim_suite(fsdp LEFT_OUT
  FullyShard/OffloadOver.IsBitForBit/2         # five ranks: the longest, and in the order of three
  *Foreign.RecurrentLanguageModel* *Foreign.AFusedLossBehindPlainLayers*  # CUDA's own kernels of recurrent networks
  *Foreign.AFrozenModelPassesGradientsOn* *Foreign.AGradientPenalty* *Foreign.DerivativesByTheInput* FullyShardLoop.WeightsAreLoadedAfterWrapping
  FullyShardLoop.WeightsArePutBackBehindAForwardThatRecordedGradients  # all of these: gradients of another rank's tensors
  FullyShard.Offload*TheUnitsInUse FullyShard.OffloadCopiesASlicePerGatherAndPerReduction FullyShard.OffloadCastsOnceAStep  # bytes of a CPU that is its own host
  FullyShard.MemoryIsOneShareOfEverythingAndTheUnitsInUse FullyShard.ThePlainLoopKeepsUnitsFromForwardToBackward
  FullyShard.GradientsAreComputedWhereTheyAreReduced  # on CUDA autograd adds up gradients itself
  FullyShard.WaitingForAPeerIsExposedTime      # the devices have a time of their own, which knows of no late peer (ExposedTimes does)
  FullyShardAsked.GradientsWithin*             # second derivatives: nodes that a device's thread makes are ordered by its past, and ranks' threads have others here
  FullyShardLoop.OneRanksFileIsNotEverybodysSlices)  # writes bytes of a file by their pointer
# Of pipeline, what runs stages; the rest are lists of actions.
tessera_sim_suite(pipeline ONLY Split.* SplitRanks.* SplitTraining.* Executor.* AsynchronousExecutor.* WeightVersions.* *Tied*
                  LEFT_OUT Split.ClassicExample Split.IntegersMasksAndViewsCross  # numbers by torch::tensor, which lie on the host
                  SplitTraining.ATiedWeightsGradientCountsOnceHoweverOftenItIsSummed
                  Split.LstmSendsItsStates Split.OtherShapesAndModesAreRecordedAnew  # CUDA's own kernels of recurrent networks
                  SplitTraining.WhatHasGapsInMemoryArrivesWithThem Split.AutocastThatForwardSetsAroundAPartIsSetAgain  # of the host's tensors and autocast
                  Executor.ErrorsNameStageAndMicroBatch)  # receives for which a step that fails has nobody to wait
# Of checkpoint, what moves tensors; the rest are files.
tessera_sim_suite(checkpoint ONLY Staging.* Dump.* Load* Forms/SaverTest.* Checkpoint.* Partial.* Safetensors.* TorchOptimizer.* RestoreOptimizer.* HuggingFaceMixtral.*
                  LEFT_OUT Staging.CountsWhatItHolds Forms/SaverTest.AFullDiskOfOneRankIsToldToAllAndTheLastGoodOneStays*  # bytes and files of a CPU's staging
                  Checkpoint.AFileOfAnotherRankThatIsNotWholeIsNoCheckpoint Safetensors.GivesBackEveryDtypeAndShape)  # read tensors by their pointers
# Of verify layouts of its own (tests/verify/device_test.cpp), the matrix in the formats that devices take, a selection of the others, and of the bugs that it has to
# find: a second device costs as much as the first.
tessera_sim_suite(verify ONLY VerifyOnDevice.* VerifyTest.SlicesOnTheHostPassAndAreBitForBitOnOneRank VerifyTest.RecomputationOnOneRankIsBitForBit VerifyTest.EveryModuleAndTensorIsCompared VerifyTest.DataParallelPasses
                  Planted.ARanksContributionThatIsDroppedIsFound Planted.AReductionThatIsLeftOutInOneUnitIsFound
                  PlantedInContext.ATermOfAGradientThatIsMissingIsFound VerifyMixture.EveryLayoutIsOneDevice *VerifyMatrix.EveryLayoutAndEveryFormat*)
tessera_sim_suite(models ALSO_KERNELS)
tessera_sim_suite(lora)
# Of the command, what measures on a device.
tessera_sim_suite(cli ONLY AttentionBench.* PipelineBench.*)
# Of plan, what a device refuses, and runs there; the rest are dry runs.
tessera_sim_suite(plan ONLY Fit.ARefusalInARunIsExplained PlannedDevice.*)
# Of train, what is about devices, where whole runs are held against the CPU's, and what goes with a run: reports of memory, texts, saves, skipped steps.
tessera_sim_suite(train ONLY StaleUnits.InEvaluationMode* TrainDevice.* DeviceChange.* StepGraphs.* ExposedTimes.* HostReads.* BatchFeeds.* PipelineTimes.*
                  Pipeline.ValidatesAndGeneratesBetweenSteps MemoryWatchTest.* MemoryReport.* *Generation* Overflowing.* Saving.* PostValidation.* TrainerTest.* PlacedTraining.Activations*
                  LEFT_OUT Overflowing.OnOneRankSkipsTheStepOnAll Overflowing.StopsAfterSkipsInARowAndNamesRankAndParameter  # rms_norm to fp16, which devices refuse
                  Overflowing.ALossThatIsNoNumberInTwoStepsRunningStopsAtAnyScale
                  PostValidation.StepsThatOverflowAreSkipped                # the same
                  PostValidation.BesideEveryThingThatFollowsAnUpdate        # stochastic rounding, refused on devices by name
                  Saving.WhatIsStagedCountsInThePeakOfTheStepsMeanwhile     # bytes of a CPU that is its own host
                  TrainerTest.ARankThatComputesLongerIsNamedOnce)           # sleeps, which no device's time knows of
